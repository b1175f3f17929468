# What a node with CRI-O has in the place of containerd. Sourced.
# shellcheck shell=bash

# Its source is no Go module that could be built: the programs come from a directory, with `crio` and `pinns` in it, or `crio`
# packed as crio-VERSION-linux-ARCH.xz.
readonly CRIO_PLACE=${CRIO:-$HERE/../../shared/crio}

readonly CRIO_PACKAGES=(conmon skopeo libseccomp2)

crio_bin() { echo "$CACHE/bin/crio-$1"; }

# CRI-O has no runc of its own.
crio_runc() { runc_bin 2; }

has_crio() { [[ -d $(crio_bin "$1") || -e $CRIO_PLACE/pinns ]]; } # VERSION

copy_crio() { # VERSION TEMP, see build_once
    local version=$1 bin=$2/bin found packed
    packed=$CRIO_PLACE/crio-$version-linux-$(go env GOARCH).xz
    [[ -d $CRIO_PLACE ]] || die "CRI-O cannot be built here: name a directory with its programs crio and pinns as CRIO"
    if [[ -e $CRIO_PLACE/crio ]]; then
        install -m 755 "$CRIO_PLACE/crio" "$bin/crio"
    else
        [[ -e $packed ]] || die "there is neither crio nor ${packed##*/} in $CRIO_PLACE"
        xz -dc "$packed" >"$bin/crio"
        chmod 755 "$bin/crio"
    fi
    install -m 755 "$CRIO_PLACE/pinns" "$bin/pinns" || die "there is no pinns in $CRIO_PLACE"
    found=$("$bin/crio" --version | awk '$2 == "version" {print $3}')
    [[ $found == "$version" ]] || die "what is in $CRIO_PLACE is CRI-O $found, not $version"
}

ensure_crio() { # VERSION
    ensure_packages "${CRIO_PACKAGES[@]}"
    ensure "$(crio_bin "$1")" copy_crio "$1"
    ensure "$(crio_runc)" build_runc "$(runc_version 2)"
}

# All that is by default in /run, /var/lib or /etc is the node's own. What /run has by default is in memory, see
# make_runtime_state. A pod's containers are ended with its cgroup, and so are their conmons.
write_crio_config() {
    local driver=cgroupfs
    ! has_systemd_cgroups || driver=systemd
    mkdir -p "$DIR"/crio/{hooks,keys,policies,conf.d}
    echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$DIR/crio/policy.json"
    write_crio_runc
    cat >"$DIR/crio.conf" <<END
[crio]
root = "$(crio_root)"
runroot = "$DIR/crio/run/storage"
storage_driver = "overlay"
log_dir = "$DIR/crio/log"
version_file = "$DIR/crio/run/version"
version_file_persist = "$DIR/crio/version"
clean_shutdown_file = "$DIR/crio/clean.shutdown"
internal_wipe = false

[crio.api]
listen = "$DIR/crio.sock"

[crio.runtime]
default_runtime = "runc"
decryption_keys_path = "$DIR/crio/keys"
cgroup_manager = "$driver"
conmon_cgroup = "pod"
container_exits_dir = "$DIR/crio/run/exits"
container_attach_socket_dir = "$DIR/crio/run/attach"
namespaces_dir = "$DIR/crio/run/ns"
hooks_dir = ["$DIR/crio/hooks"]
cdi_spec_dirs = ["$DIR/cdi"]
pinns_path = "$(crio_bin "$CRIO_RELEASE")/pinns"
enable_criu_support = false
apparmor_profile = "unconfined"
ctr_stop_timeout = 10

[crio.runtime.runtimes.runc]
runtime_path = "$DIR/bin/crio-runc"
runtime_type = "oci"
runtime_root = "$DIR/crio/run/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"

[crio.image]
pause_image = "$PAUSE_IMAGE"
pause_command = "/pause"
signature_policy = "$DIR/crio/policy.json"
signature_policy_dir = "$DIR/crio/policies"
namespaced_auth_dir = "$DIR/crio/auth"

[crio.network]
network_dir = "$DIR/cni/net.d"
plugin_dirs = ["/usr/lib/cni"]

[crio.nri]
enable_nri = $([[ $NRI == on ]] && echo true || echo false)
nri_listen = "$DIR/nri/nri.sock"
nri_plugin_dir = "$NRI_PLUGINS"
nri_plugin_config_dir = "$DIR/nri/conf.d"
END
}

# At each removal CRI-O waits for the disk, which other nodes may keep busy: it is in memory, unless a reboot is to be outlived.
crio_root() { if has_systemd; then echo "$DIR/crio/root"; else echo "$DIR/crio/run/root"; fi; }

# CRI-O asks for what needs CAP_SYS_RESOURCE, and for limits of huge pages, which a cgroup may lack. containerd has settings
# for both.
write_crio_runc() {
    local runc filter='del(.linux.resources.hugepageLimits)'
    runc=$(crio_runc)/runc
    can_lower_oom_scores || filter+='
        | if .process.oomScoreAdj < 0 then .process.oomScoreAdj = 0 else . end
        | if .process.capabilities then .process.capabilities[] -= ["CAP_SYS_RESOURCE"] else . end'
    cat >"$DIR/bin/crio-runc" <<END
#!/bin/sh
for arg; do
    [ "\$before" != --bundle ] || config=\$arg/config.json
    before=\$arg
done
# Only \`create\` has one.
[ ! "\$config" ] || { jq '$filter' "\$config" >"\$config.new" && mv "\$config.new" "\$config"; }
exec $runc "\$@"
END
    chmod 755 "$DIR/bin/crio-runc"
}

import_crio_image() { # TAR
    local name storage
    storage="overlay@$(crio_root)+$DIR/crio/run/storage"
    name=$(tar -xOf "$1" manifest.json | jq -r '.[0].RepoTags[0]')
    TMPDIR=$DIR/crio/run skopeo --policy "$DIR/crio/policy.json" copy "docker-archive:$1" "containers-storage:[$storage]$name"
}
