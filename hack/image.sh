#!/usr/bin/env bash
# The static executable, and the image with nothing else in it: an OCI archive for both architectures, made without a registry.
# The same sources give the same bytes, wherever and whenever the same compilers build them.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"
# shellcheck source=/dev/null
source "$HERE/build.sh"
cd "$HERE/.."

readonly ARCHITECTURES=(amd64 arm64)
readonly SBOM_VERSION=0.10.0
# What rustup is asked for otherwise: Debian's sources of the standard library of the compiler that Cargo.toml asks for.
readonly RUST_SRC=pool/main/r/rustc/rust-src_1.95.0+dfsg1-2~bpo13+1_all.deb
readonly RUST_SRC_SHA256=7b76db5b880a77f9e52975d2baa6209d2f76d2c9c2789515c3088cb960e2c83b
# For each executable, bytes: hundreds of nodes pull it.
readonly LARGEST=$((12 << 20))

usage() {
    cat <<END
usage: hack/image.sh [--arch ARCH]... [DIR]   puts executables, archive and SBOM there (default: target/image,
                                              of some architectures alone target/image-ARCH)
       hack/image.sh --check [--arch ARCH]    builds it all a second time, from a copy elsewhere, and compares
ARCH: ${ARCHITECTURES[*]} (default: both). A quarter of an hour for each on two cores, the first time.
On a node: ctr -n k8s.io images import reprise-VERSION.oci.tar makes localhost/reprise:VERSION.
END
}

triple() { # ARCH
    case $1 in
    amd64) echo x86_64-unknown-linux-gnu ;;
    arm64) echo aarch64-unknown-linux-gnu ;;
    *) die "no such architecture: '$1' (known: ${ARCHITECTURES[*]})" ;;
    esac
}

# The C compiler for it, as Debian calls it; it links, and makes the allocator.
gcc_of() { # ARCH
    local triple
    triple=$(triple "$1")
    echo "${triple/-unknown/}-gcc"
}

# The linker that comes with rustc, for all architectures: it folds functions that are the same, and packs relocations.
linker_dir() { echo "$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/gcc-ld"; }

ensure_compilers() { # ARCH...
    local arch wanted=(make jq gcc libc6-dev)
    for arch; do
        [[ $(dpkg --print-architecture) == "$arch" ]] ||
            wanted+=("gcc-$(gcc_of "$arch" | sed 's/-gcc$//; s/_/-/')" "libc6-dev-$arch-cross")
    done
    ensure_packages "${wanted[@]}"
}

# Prints what cargo is to be told where the standard library for it must be built along.
library_options() { # ARCH
    local triple root
    triple=$(triple "$1")
    [[ ! -e $(rustc --print target-libdir --target "$triple") ]] || return 0
    if rustup target add "$triple" >&2; then
        return
    fi
    # rustup has no network here.
    root=$(rustc --print sysroot)/lib/rustlib/src/rust
    [[ -e $root/library/Cargo.lock ]] || with_lock "$CACHE/lock/rust-src" fetch_library "$root" >&2
    echo -Zbuild-std=std,panic_unwind
}

fetch_library() { # DIR
    local mirror temp
    [[ $(rustc --version) == "rustc 1.95.0 "* ]] || die "for arm64, rustup has no network, and Debian's sources are of rustc 1.95.0"
    # shellcheck disable=SC2016 # apt's own variable
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | sort -u | head -n 1)
    temp=$(mktemp -d)
    say "fetching the sources of Rust's standard library"
    curl -sSf -o "$temp/deb" "$mirror/$RUST_SRC"
    sha256sum --quiet --check <<<"$RUST_SRC_SHA256  $temp/deb" || die "$RUST_SRC is not what it was"
    dpkg-deb --extract "$temp/deb" "$temp/root"
    mkdir -p "$1"
    mv "$temp/root/usr/src/rustc-1.95.0/library" "$1/"
    rm -rf "$temp"
}

# No path of this machine is in it, and no page of the kernel's is too large for the allocator.
build_executable() { # ARCH DIR
    local arch=$1 out=$2 triple gcc began=$SECONDS options upper lower
    triple=$(triple "$arch")
    gcc=$(gcc_of "$arch")
    lower=${triple//-/_}
    upper=${lower^^}
    options=$(library_options "$arch")
    local target=${CARGO_TARGET_DIR:-$PWD/target}
    say "building the executable for $arch"
    env "CARGO_TARGET_${upper}_LINKER=$gcc" "CC_$lower=$gcc" \
        "CFLAGS_$lower=-ffile-prefix-map=$target=/target -ffile-prefix-map=${CARGO_HOME:-$HOME/.cargo}=/cargo" \
        RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$PWD=/reprise --remap-path-prefix=$target=/target \
--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$(rustc --print sysroot)/lib/rustlib/src=/rust" \
        ${options:+RUSTC_BOOTSTRAP=1} JEMALLOC_SYS_WITH_LG_PAGE=16 \
        cargo rustc --release --locked --quiet --bin reprise --target "$triple" ${options:+"$options"} -- \
        -C link-arg=-fuse-ld=lld -C "link-arg=-B$(linker_dir)" \
        -C link-arg=-Wl,--icf=all -C link-arg=-Wl,--pack-dyn-relocs=relr
    install -D -m 755 "$target/$triple/release/reprise" "$out/$arch/reprise"
    ! readelf --program-headers "$out/$arch/reprise" | grep -q INTERP || die "the executable for $arch is not static"
    local size
    size=$(stat -c %s "$out/$arch/reprise")
    ((size <= LARGEST)) || die "the executable for $arch has $size bytes, more than $LARGEST"
    say "built it in $((SECONDS - began)) s: $((size / 1024)) KiB"
}

# Puts a file into the layout under its digest, which it prints as a descriptor of that media type.
add_blob() { # LAYOUT FILE MEDIA_TYPE
    local digest
    digest=$(sha256sum "$2" | cut -d' ' -f1)
    install -D -m 644 "$2" "$1/blobs/sha256/$digest"
    jq -nc --arg type "$3" --arg digest "sha256:$digest" --argjson size "$(stat -c %s "$2")" \
        '{mediaType: $type, digest: $digest, size: $size}'
}

# The same bytes from the same files.
stable_tar() { # DIR TAR FILE...
    tar -C "$1" --sort=name --format=ustar --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$2" "${@:3}"
}

# One manifest, for one architecture (OCI image-spec 1.1, `manifest.md`).
add_manifest() { # LAYOUT DIR ARCH TEMP
    local layout=$1 dir=$2 arch=$3 temp=$4 layer config
    local media=application/vnd.oci.image
    stable_tar "$dir/$arch" "$temp/layer.tar" reprise
    layer=$(add_blob "$layout" "$temp/layer.tar" $media.layer.v1.tar)
    jq -nc --arg arch "$arch" --argjson layer "$layer" --arg version "$(version)" '{
        architecture: $arch, os: "linux", config: {Entrypoint: ["/reprise"], Cmd: ["run"], Labels: {
            "org.opencontainers.image.title": "reprise", "org.opencontainers.image.version": $version,
            "org.opencontainers.image.licenses": "Apache-2.0"}},
        rootfs: {type: "layers", diff_ids: [$layer.digest]}}' >"$temp/config.json"
    config=$(add_blob "$layout" "$temp/config.json" $media.config.v1+json)
    jq -nc --arg type $media.manifest.v1+json --argjson config "$config" --argjson layer "$layer" \
        '{schemaVersion: 2, mediaType: $type, config: $config, layers: [$layer]}' >"$temp/manifest.json"
    add_blob "$layout" "$temp/manifest.json" $media.manifest.v1+json |
        jq -c --arg arch "$arch" '. + {platform: {architecture: $arch, os: "linux"}}'
}

# An image of all the architectures, as an archive of an OCI layout (`image-layout.md`).
build_archive() { # DIR ARCH...
    local dir=$1 temp layout arch type=application/vnd.oci.image.index.v1+json
    shift
    temp=$(mktemp -d)
    layout=$temp/layout
    mkdir "$layout"
    for arch; do
        add_manifest "$layout" "$dir" "$arch" "$temp"
    done | jq -cs --arg type $type '{schemaVersion: 2, mediaType: $type, manifests: .}' >"$temp/index.json"
    add_blob "$layout" "$temp/index.json" $type |
        jq -c --arg type $type --arg version "$(version)" '{schemaVersion: 2, mediaType: $type, manifests: [. + {annotations: {
            "io.containerd.image.name": ("localhost/reprise:" + $version), "org.opencontainers.image.ref.name": $version}}]}' \
            >"$layout/index.json"
    echo '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"
    stable_tar "$layout" "$dir/reprise-$(version).oci.tar" oci-layout index.json blobs
    rm -rf "$temp"
}

# What it is made of. The tool notes when and under which random name; the lock file says as much, and the same each time.
build_sbom() { # DIR
    local lock
    ensure_tool cargo-sbom "$SBOM_VERSION"
    lock=$(sha256sum Cargo.lock | cut -d' ' -f1)
    "$CACHE/tools/bin/cargo-sbom" --cargo-package reprise --output-format spdx_json_2_3 |
        jq --arg name "https://spdx.org/spdxdocs/reprise-$(version)-$lock" \
            '.creationInfo.created = "1970-01-01T00:00:00Z" | .documentNamespace = $name' >"$1/reprise-$(version).spdx.json"
}

build() { # DIR ARCH...
    local dir=$1 arch
    shift
    mkdir -p "$dir"
    ensure_compilers "$@"
    for arch; do
        build_executable "$arch" "$dir"
    done
    build_archive "$dir" "$@"
    build_sbom "$dir"
    say "in $dir:"
    (cd "$dir" && sha256sum -- */reprise reprise-*.oci.tar reprise-*.spdx.json)
}

# One of fewer architectures than are released takes the place of none that is.
default_dir() { # ARCH...
    local IFS=-
    if [[ "$*" == "${ARCHITECTURES[*]}" ]]; then echo target/image; else echo "target/image-$*"; fi
}

# From a clone elsewhere, where nothing was built before: none of that may show.
check() { # ARCH...
    local first second code=0
    first=$(build "$PWD/$(default_dir "$@")" "$@" | tee /dev/stderr | grep '^[0-9a-f]\{64\} ')
    TEMP=$(mktemp -d)
    trap 'rm -rf "$TEMP"' EXIT
    git clone --quiet . "$TEMP/some-where-else"
    second=$(CARGO_TARGET_DIR=$TEMP/target "$TEMP/some-where-else/hack/image.sh" \
        "${@/#/--arch=}" "$TEMP/image" | tee /dev/stderr | grep '^[0-9a-f]\{64\} ') || code=$?
    ((code == 0)) || die "the second time it cannot be built"
    diff <(echo "$first") <(echo "$second") || die "built twice, not the same (commit first: the second time is from a clone)"
    say "built twice: the same bit for bit"
}

main() {
    local archs=() dir='' checks=
    while (($#)); do
        case $1 in
        --arch) archs+=("${2:?--arch needs a name}") && shift ;;
        --arch=*) archs+=("${1#*=}") ;;
        --check) checks=yes ;;
        -h | --help) usage && exit ;;
        -*) usage >&2 && exit 2 ;;
        *) dir=$1 ;;
        esac
        shift
    done
    ((${#archs[@]})) || archs=("${ARCHITECTURES[@]}")
    local arch
    for arch in "${archs[@]}"; do
        triple "$arch" >/dev/null
    done
    : "${dir:=$(default_dir "${archs[@]}")}"
    if [[ $checks ]]; then check "${archs[@]}"; else build "$(realpath -m "$dir")" "${archs[@]}"; fi
}

main "$@"
