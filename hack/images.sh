# Makes the images that a node needs, as docker archives, from local programs. Sourced.
# shellcheck shell=bash

# No host of that name serves images: what is not imported fails instead of being pulled.
readonly BUSYBOX_IMAGE=localhost/reprise/busybox:1
readonly OTHER_IMAGE=localhost/reprise/busybox:2
readonly PAUSE_IMAGE=localhost/reprise/pause:1

# The number goes up with what is built.
images_dir() { echo "$CACHE/images-2"; }

# Packs a root file system as the only layer of an image, with its parts in ROOT.image.
pack_image() { # ROOT TAG COMMAND TAR
    local root=$1 tag=$2 command=$3 tar=$4 work=$1.image digest
    rm -rf "$work"
    mkdir "$work"
    tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$work/layer.tar" .
    digest=$(sha256sum "$work/layer.tar" | cut -d' ' -f1)
    jq -n --arg digest "sha256:$digest" --arg command "$command" --arg arch "$(dpkg --print-architecture)" '{
        architecture: $arch, os: "linux", created: "1970-01-01T00:00:00Z",
        config: {Env: ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], Cmd: [$command], WorkingDir: "/"},
        rootfs: {type: "layers", diff_ids: [$digest]},
        history: [{created: "1970-01-01T00:00:00Z"}]}' >"$work/config.json"
    jq -n --arg tag "$tag" \
        '[{Config: "config.json", RepoTags: [$tag], Layers: ["layer.tar"]}]' >"$work/manifest.json"
    tar -C "$work" -cf "$tar" manifest.json config.json layer.tar
}

busybox_root() { # ROOT
    local root=$1
    mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,etc,root,var}
    install -d -m 1777 "$root/tmp"
    install -m 755 /bin/busybox "$root/bin/busybox"
    local applet
    for applet in $(/bin/busybox --list-full); do
        [[ $applet == bin/busybox || $applet == linuxrc ]] || ln -s /bin/busybox "$root/$applet"
    done
    echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
}

build_images() { # _ TEMP, see build_once
    local temp=$2 root=$2/src
    busybox_root "$root/busybox"
    pack_image "$root/busybox" "$BUSYBOX_IMAGE" /bin/sh "$temp/bin/busybox.tar"
    touch "$root/busybox/other"
    pack_image "$root/busybox" "$OTHER_IMAGE" /bin/sh "$temp/bin/busybox-other.tar"
    mkdir -p "$root/pause"
    cc -Os -static -o "$root/pause/pause" "$HERE/pause.c"
    strip "$root/pause/pause"
    pack_image "$root/pause" "$PAUSE_IMAGE" /pause "$temp/bin/pause.tar"
}

ensure_images() { ensure "$(images_dir)" build_images -; }

import_images() {
    local tar
    for tar in "$(images_dir)"/*.tar; do
        case $RUNTIME in
        containerd) ctr -n k8s.io images import --local "$tar" ;;
        crio) import_crio_image "$tar" ;;
        esac
    done
}
