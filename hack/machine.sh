# What a node takes from the machine and gives back: slot, bridge, cgroups, sysctls, mounts. Sourced.
# shellcheck shell=bash

# One for the whole machine, whatever REPRISE_NODES says: ports and bridges are the machine's.
readonly REGISTRY=/run/reprise-nodes
readonly REGISTRY_LOCK=/run/lock/reprise-nodes

# The kubelet sets these at its start (setupKernelTunables in container_manager_linux.go).
readonly KUBELET_SYSCTLS=(vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops
    kernel.keys.root_maxkeys kernel.keys.root_maxbytes)

open_registry() {
    mkdir -p "$REGISTRY/slots"
    [[ -n $(ls "$REGISTRY/slots") ]] || sysctl "${KUBELET_SYSCTLS[@]}" >"$REGISTRY/sysctl.conf" 2>/dev/null || true
}

# A slot is a file with the directory of the node that has it.
claim_slot() {
    local slot
    open_registry
    for slot in {1..99}; do
        if [[ -e $REGISTRY/slots/$slot ]] || ! ports_free "$slot"; then continue; fi
        echo "$DIR" >"$REGISTRY/slots/$slot"
        echo "$slot" >"$DIR/slot"
        return
    done
    die "no free slot in $REGISTRY"
}

# The one that the node has had, after a reboot.
hold_slot() {
    local holder
    open_registry
    holder=$(cat "$REGISTRY/slots/$SLOT" 2>/dev/null) || holder=$DIR
    [[ $holder == "$DIR" ]] || die "slot $SLOT is that of $holder by now"
    echo "$DIR" >"$REGISTRY/slots/$SLOT"
}

# A directory that has outlived a reboot has a slot number, but no longer the slot.
claimed_slot() {
    local slot
    slot=$(cat "$DIR/slot" 2>/dev/null) || return
    [[ $(cat "$REGISTRY/slots/$slot" 2>/dev/null) == "$DIR" ]] && echo "$slot"
}

ports_free() { # SLOT
    local SLOT=$1 name
    for name in etcd etcd-peer apiserver kubelet kubelet-health controller-manager registry; do
        [[ -z $(ss -Hltn "sport = :$(port $name)") ]] || return
    done
}

release_slot() {
    rm -f "$REGISTRY/slots/$SLOT"
    [[ -z $(ls "$REGISTRY/slots") ]] || return 0
    [[ ! -e $REGISTRY/sysctl.conf ]] || sysctl -q -e -p "$REGISTRY/sysctl.conf" >/dev/null
    rm -rf "$REGISTRY"
    remove_shared_dirs
}

# Places that the kubelet, CNI, skopeo and the shims share with all of their kind and that cannot be
# configured; they go with the last node, if nobody else has put anything there.
remove_shared_dirs() {
    local dir
    for dir in /var/lib/kubelet/device-plugins /var/lib/kubelet /var/lib/cni/results /var/lib/cni \
        /var/lib/containers/cache /var/lib/containers /var/log/containers /run/containerd/s /run/containerd/fifo \
        /run/containerd/runc/k8s.io /run/containerd/runc /run/containerd \
        /sys/fs/cgroup/*/k8s.io; do
        [[ $dir != */device-plugins ]] || rm -f "$dir"/{kubelet.sock,DEPRECATION}
        [[ $dir != */cache ]] || rm -f "$dir"/blob-info-cache-v1.{boltdb,sqlite}
        rmdir "$dir" 2>/dev/null || true
    done
}

make_bridge() {
    [[ ! -e /sys/class/net/$(bridge) ]] || return 0
    ip link add "$(bridge)" type bridge
    ip addr add "$(node_ip)/24" dev "$(bridge)"
    ip link set "$(bridge)" up
}

remove_bridge() {
    [[ ! -e /sys/class/net/$(bridge) ]] || ip link del "$(bridge)"
}

cgroup_v1_mounts() { awk '$3 == "cgroup" {print $2}' /proc/mounts; }
cgroup_v2_mount() { awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts; }

has_cgroup_v2() { [[ $(cgroup_v2_mount) == /sys/fs/cgroup ]]; }

# The kubelet wants its cgroupRoot to be there, with every controller.
make_cgroups() {
    local mount file controller unified
    while read -r mount; do
        mkdir -p "$mount$(cgroup)"
        # A new cpuset is empty and takes no process.
        for file in cpuset.cpus cpuset.mems; do
            [[ ! -e $mount/$file ]] || cat "$mount/$file" >"$mount$(cgroup)/$file"
        done
    done < <(cgroup_v1_mounts)
    has_cgroup_v2 || return 0
    unified=$(cgroup_v2_mount)
    if has_systemd; then
        systemctl start "$(slice)"
    else
        mkdir -p "$unified$(cgroup)"
    fi
    for controller in $(<"$unified/cgroup.controllers"); do
        echo "+$controller" >"$unified/cgroup.subtree_control" || true
    done
}

# A container made past the kubelet may have a cgroup elsewhere, which its bundle names. What is in
# there gets killed, so it must be the container's alone: called after it.
stray_cgroup_paths() {
    local bundles=("$DIR"/containerd/state/io.containerd.runtime.v2.task/*/*/config.json)
    [[ ! -e ${bundles[0]} ]] || jq -r --arg ours "$(cgroup)/" \
        '("/" + (input_filename | split("/")[-2])) as $own | .linux.cgroupsPath | strings |
            select(endswith($own) and (startswith($ours) | not))' "${bundles[@]}"
}

node_cgroups() { # all of the node's, children first
    local mount path paths
    mapfile -t paths < <(cgroup && stray_cgroup_paths)
    { cgroup_v1_mounts && cgroup_v2_mount; } | while read -r mount; do
        for path in "${paths[@]}"; do
            [[ ! -d $mount$path ]] || find "$mount$path" -depth -type d
        done
    done
}

pids_in() { # CGROUP...
    # 0 stands for a process of a foreign PID namespace, and in kill(1) for our own process group.
    { cat "${@/%//cgroup.procs}" 2>/dev/null || true; } | sort -u | sed '/^0$/d'
}

# Kills what is in the node's cgroups, then removes them.
remove_cgroups() {
    local groups
    mapfile -t groups < <(node_cgroups)
    ((${#groups[@]})) || return 0
    wait_for 30 "end of the containers' processes" kill_all_in "${groups[@]}"
    wait_for 10 "removal of the cgroups" remove_dirs "${groups[@]}"
}

kill_all_in() { # CGROUP...; succeeds when nothing was left to kill
    local pids
    mapfile -t pids < <(pids_in "$@")
    ((${#pids[@]})) || return 0
    kill -KILL "${pids[@]}" 2>/dev/null
    return 1
}

remove_dirs() { # DIR...
    local dir
    rmdir "$@" 2>/dev/null || true
    for dir in "$@"; do
        [[ ! -d $dir ]] || return
    done
}

# The shims outlive containerd by design, and a runc may be at work for one of them. They are ours
# if they serve our socket or work in our directory.
runtime_pids() {
    local process args
    for process in /proc/[0-9]*; do
        # A process may end between the listing and the look.
        mapfile -d '' -t args 2>/dev/null <"$process/cmdline" || continue
        ((${#args[@]})) || continue
        case "${args[0]##*/} ${args[*]} " in
        "containerd-shim-"*" $DIR/containerd.sock "* | "runc "*" $DIR/"* | "conmon "*" $DIR/"*)
            echo "${process#/proc/}"
            ;;
        esac
    done
}

no_runtimes() { [[ -z $(runtime_pids) ]]; }

remove_runtimes() {
    local pid sockets
    mapfile -t sockets < <(grep -rhoE '/run/containerd/s/[0-9a-f]+' \
        "$DIR/containerd/state/io.containerd.runtime.v2.task" 2>/dev/null)
    for pid in $(runtime_pids); do
        kill -KILL "$pid" 2>/dev/null || true
    done
    wait_for 30 "end of the shims" no_runtimes
    ((!${#sockets[@]})) || rm -f "${sockets[@]}"
}

# In memory, as a real node has it (/run/containerd). The shim of containerd 2.4 waits until an exit is on the disk before
# it tells of it, and of the next of the pod.
make_runtime_state() {
    local state
    state=$(runtime_state)
    ! mountpoint -q "$state" || return 0
    mkdir -p "$state"
    mount -t tmpfs -o mode=711 tmpfs "$state"
}

runtime_state() {
    case $RUNTIME in
    containerd) echo "$DIR/containerd/state" ;;
    crio) echo "$DIR/crio/run" ;;
    esac
}

# The trailing slash keeps node "a" away from the mounts of node "ab".
node_mounts() { # the innermost first
    awk -v dir="$DIR/" 'index($5, dir) == 1 {print $5}' /proc/self/mountinfo | tac
}

# A mount that stayed would have its files deleted with the directory, a hostPath's among them.
remove_mounts() {
    wait_for 30 "end of the mounts in $DIR" unmount_all
}

unmount_all() { # succeeds when nothing was left to unmount
    local mounts mount
    mapfile -t mounts < <(node_mounts)
    for mount in "${mounts[@]}"; do
        umount "$mount" || umount --lazy "$mount"
    done
    ((!${#mounts[@]}))
}

# Log links and CNI results in shared places: those that name our directory. The default place of
# runc's state: containers that have a bundle in our directory.
remove_shared_files() {
    local link file bundle
    for link in /var/log/containers/*; do
        [[ $(readlink "$link") != "$DIR"/* ]] || rm -f "$link"
    done
    for file in /var/lib/cni/results/*; do
        ! grep -qsF "$DIR/" "$file" || rm -f "$file"
    done
    for bundle in "$DIR"/containerd/state/io.containerd.runtime.v2.task/k8s.io/*; do
        rm -rf "/run/containerd/runc/k8s.io/$(basename "$bundle")"
    done
}
