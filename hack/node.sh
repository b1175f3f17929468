#!/usr/bin/env bash
# A real Kubernetes node (etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, containerd or CRI-O, runc)
# on this machine, any number of them side by side. See README.md beside this file.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build images config crio process units machine; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done

# Short, because a unix socket's path has 107 characters at most.
readonly NODES=${REPRISE_NODES:-/tmp/reprise-nodes}
readonly COMPONENTS=(etcd apiserver controller-manager scheduler containerd crio "${KUBELETS[@]}")

usage() {
    cat <<END
usage: node.sh build [VERSIONS]                      build and install what a node needs
       node.sh up NAME [VERSIONS]                    start a node; the output can be evaluated
               [--nri-plugin-dir DIR] [--no-nri] [--feature-gates K=V,...]
               [--service-accounts]                  pods get tokens, as in a cluster
               [--control-plane-only]                no runtime, no kubelet
               [--join ADDRESS:PORT DIR]             no control plane: that of another node, whose directory is DIR, is there
       node.sh env NAME                              print the variables again
       node.sh resume NAME                           take from the machine what a reboot took; systemd does it by itself
       node.sh down NAME                             end it and remove every trace
       node.sh start|stop|kill NAME COMPONENT        one of: ${COMPONENTS[*]:0:4}
                                                     ${COMPONENTS[*]:4}
       node.sh list                                  nodes and the state of their components
       node.sh packages                              install Debian packages, as build does
       node.sh jobset                                build JobSet's controller and agent, for the scenarios of groups
       node.sh protos                                print where upstream's .proto files are
VERSIONS
  --k8s V         ${K8S_VERSIONS[*]} (default $DEFAULT_K8S)
  --kubelet V     the same, but not newer than the API server (default: as --k8s)
  --containerd V  ${CONTAINERD_VERSIONS[*]} (default $DEFAULT_CONTAINERD)
  --crio V        ${CRIO_VERSIONS[*]}: CRI-O in the place of containerd, from the directory that CRIO names
END
}

# Chooses the node that the functions of the other files work on.
use_node() { # NAME
    [[ $1 =~ ^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$ ]] ||
        die "'$1' is no name for a node: up to 20 of a-z, 0-9 and - inside"
    NODE=$1 DIR=$NODES/$1
    [[ ! -e $NODES ]] || must_be_ours "$NODES"
    ((${#DIR} <= 60)) || die "$DIR is too long for the sockets in it; set REPRISE_NODES"
}

# The same for one that is there, with what `up` wrote down about it.
use_existing_node() { # NAME
    use_node "$1"
    [[ -e $DIR/settings ]] || die "there is no node '$1'"
    # One that an older checkout has made says nothing of its runtime.
    RUNTIME=containerd CRIO_RELEASE=''
    # shellcheck source=/dev/null
    source "$DIR/settings"
    SLOT=$(cat "$DIR/slot")
}

parse_options() {
    K8S=$DEFAULT_K8S KUBELET='' RUNTIME=containerd CONTAINERD=$DEFAULT_CONTAINERD CRIO_RELEASE='' GATES='' ACCOUNTS='' NRI=on NRI_PLUGINS='' PART='' API='' API_DIR=''
    while (($#)); do
        case $1 in
        --no-nri) NRI=off && shift && continue ;;
        --service-accounts) ACCOUNTS=yes && shift && continue ;;
        --control-plane-only) PART=control-plane && shift && continue ;;
        --join)
            (($# > 2)) || die "$1 needs an address and a directory"
            PART=node API=$2 API_DIR=$3
            shift 3 && continue
            ;;
        --k8s | --kubelet | --containerd | --crio | --nri-plugin-dir | --feature-gates) ;;
        *) die "unknown option '$1'" ;;
        esac
        (($# > 1)) || die "$1 needs a value"
        case $1 in
        --k8s) K8S=${2#v} ;;
        --kubelet) KUBELET=${2#v} ;;
        --containerd) CONTAINERD=${2#v} ;;
        --crio) RUNTIME=crio CRIO_RELEASE=${2#v} ;;
        --nri-plugin-dir) NRI_PLUGINS=$(realpath "$2") ;;
        --feature-gates) GATES=$2 ;;
        esac
        shift 2
    done
    KUBELET=${KUBELET:-$K8S}
    one_of "Kubernetes version" "$K8S" "${K8S_VERSIONS[@]}"
    one_of "kubelet version" "$KUBELET" "${K8S_VERSIONS[@]}"
    [[ $(printf '%s\n' "$KUBELET" "$K8S" | sort --version-sort | tail -n 1) == "$K8S" ]] ||
        die "kubelet $KUBELET is newer than Kubernetes $K8S, which no API server supports"
    one_of "containerd version" "$CONTAINERD" "${CONTAINERD_VERSIONS[@]}"
    [[ $RUNTIME != crio ]] || one_of "CRI-O version" "$CRIO_RELEASE" "${CRIO_VERSIONS[@]}"
}

build() {
    ensure_packages "${NODE_PACKAGES[@]}"
    ensure_images
    case $RUNTIME in
    containerd) ensure_containerd "$CONTAINERD" ;;
    crio) ensure_crio "$CRIO_RELEASE" ;;
    esac
    ensure_kubernetes "$K8S" kubectl
    [[ $PART == node ]] || ensure_kubernetes "$K8S" kube-apiserver kube-controller-manager kube-scheduler
    ensure_kubernetes "$KUBELET" kubelet
    ensure_protos
}

runtime_version() {
    case $RUNTIME in
    containerd) echo "containerd $CONTAINERD" ;;
    crio) echo "CRI-O $CRIO_RELEASE" ;;
    esac
}

write_settings() {
    local name
    for name in K8S KUBELET RUNTIME CONTAINERD CRIO_RELEASE GATES ACCOUNTS NRI NRI_PLUGINS API API_DIR; do
        printf '%s=%q\n' "$name" "${!name}"
    done >"$DIR/settings"
}

up() {
    # For root alone, but root in a pod's own user namespace goes through it to its files.
    mkdir -p "$(dirname "$NODES")"
    mkdir -m 711 "$NODES" 2>/dev/null || must_be_ours "$NODES"
    chmod 711 "$NODES"
    mkdir -m 711 "$DIR" 2>/dev/null || die "node '$NODE' is there already (node.sh down $NODE)"
    NRI_PLUGINS=${NRI_PLUGINS:-$DIR/nri/plugins}
    with_lock "$REGISTRY_LOCK" claim_slot
    SLOT=$(cat "$DIR/slot")
    write_settings
    say "node $NODE: Kubernetes $K8S, kubelet $KUBELET, $(runtime_version), slot $SLOT"
    write_configs
    ! has_systemd || write_units
    take_from_machine
    start_component etcd
    [[ $PART == control-plane ]] || start_component "$RUNTIME"
    await_component etcd
    start_component apiserver
    if [[ $PART != control-plane ]]; then
        await_component "$RUNTIME"
        import_images >>"$DIR/log/$RUNTIME.log" 2>&1
    fi
    await_component apiserver
    say "API server is up"
    [[ $PART == node ]] || write_plugin_credentials
    start_component controller-manager
    await_component controller-manager
    if [[ $PART != control-plane ]]; then
        start_component kubelet
        await kubelet "ready node" node_ready
        say "node is ready"
    fi
    write_env
    cat "$DIR/env"
}

take_from_machine() {
    make_bridge
    make_cgroups
    make_runtime_state
}

resume() {
    with_lock "$REGISTRY_LOCK" hold_slot
    take_from_machine
}

# Works with whatever is left of a node: no step needs a component that answers.
down() {
    [[ -d $DIR ]] || {
        say "there is no node '$NODE'"
        return
    }
    local component
    for component in "${KUBELETS[@]}" containerd crio scheduler controller-manager apiserver etcd; do
        end_component KILL "$component"
    done
    ! has_systemd || remove_units
    remove_cgroups
    remove_runtimes
    remove_cgroups # once more, for what was about to be made the first time
    remove_shared_files
    remove_mounts
    if SLOT=$(claimed_slot); then
        remove_bridge
        with_lock "$REGISTRY_LOCK" release_slot
    fi
    rm -rf --one-file-system "$DIR"
    rmdir "$NODES" 2>/dev/null || true
    say "node $NODE is gone"
}

list() {
    local settings component states
    for settings in "$NODES"/*/settings; do
        [[ -e $settings ]] || continue
        use_existing_node "$(basename "$(dirname "$settings")")"
        states=()
        for component in "${COMPONENTS[@]}"; do
            [[ $component != @(containerd|crio) || $component == "$RUNTIME" ]] || continue
            states+=("$component=$(is_alive "$component" && echo up || echo down)")
        done
        echo "$NODE kubernetes=$K8S kubelet=$KUBELET $(runtime_version | tr " " =) nri=$NRI slot=$SLOT ${states[*]}"
    done
}

component() { # start|stop|kill COMPONENT
    one_of component "$2" "${COMPONENTS[@]}"
    case $1 in
    start)
        start_component "$2"
        await_component "$2"
        ;;
    stop) end_component TERM "$2" ;;
    kill) end_component KILL "$2" ;;
    esac
}

main() {
    local command=${1:-help}
    shift || true
    case $command in
    help | -h | --help) usage && return ;;
    build | up | down | env | resume | start | stop | kill | list | packages | protos | jobset) ;;
    *) usage >&2 && die "unknown command '$command'" ;;
    esac
    [[ $command == @(build|packages|protos|jobset|list) ]] || (($#)) || die "$command needs the name of a node"
    [[ $command == @(protos|list|env) ]] || ((EUID == 0)) ||
        die "$command must be root: it installs, mounts, makes cgroups and bridges"
    case $command in
    build)
        parse_options "$@"
        build
        ;;
    packages) ensure_packages "${NODE_PACKAGES[@]}" "${BUILD_PACKAGES[@]}" ;;
    protos) print_protos ;;
    jobset) ensure_jobset ;;
    list) list ;;
    up)
        use_node "$1"
        parse_options "${@:2}"
        build
        up
        ;;
    down)
        use_node "$1"
        down
        ;;
    env)
        use_existing_node "$1"
        cat "$DIR/env"
        ;;
    resume)
        use_existing_node "$1"
        resume
        ;;
    *)
        (($# == 2)) || die "$command needs a node and a component"
        use_existing_node "$1"
        component "$command" "$2"
        ;;
    esac
}

# Bash reads a script as it goes; it must not go on after a build of minutes in which this file has
# changed.
main "$@"; exit
