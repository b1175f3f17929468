# Shared by the scripts in this directory: names, versions, locks, waiting. Sourced, never run.
# shellcheck shell=bash

readonly K8S_VERSIONS=(1.33.13 1.34.4 1.35.4 1.36.3 1.37.2)
readonly CONTAINERD_VERSIONS=(1.7.35 2.3.7 2.4.2)
readonly CRIO_VERSIONS=(1.36.3)

# The ways to run the kubelet: one node's agent, with the same directory, ports and pods.
readonly KUBELETS=(kubelet kubelet-standalone kubelet-exclusive-cpus kubelet-evented-pleg kubelet-other-runtime
    kubelet-without-restart-all kubelet-quick-back-off kubelet-shutdown)

readonly DEFAULT_K8S=1.37.2
readonly DEFAULT_CONTAINERD=2.4.2

readonly CACHE=${REPRISE_CACHE:-$HOME/.cache/reprise}
# What this machine is called in a virtual one.
# shellcheck disable=SC2034 # elsewhere
readonly OUTSIDE=10.0.2.100

# Progress is a shell comment, so that the output of `node.sh up` as a whole can be evaluated.
say() { printf '# %s %s\n' "$(date +%T)" "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Makes the image of this machine's architecture, and says where its archive is.
own_image() {
    local arch
    arch=$(dpkg --print-architecture)
    "$HERE/image.sh" --arch "$arch" >&2 && realpath "$HERE/../target/image-$arch/reprise-$(version).oci.tar"
}

version() { sed -n 's/^version = "\(.*\)"/\1/p' "$HERE/../Cargo.toml" | head -n 1; }

# A program that cargo builds, in $CACHE/tools/bin, of this very version.
ensure_tool() { # NAME VERSION
    local installed
    installed=$("$CACHE/tools/bin/$1" --version 2>/dev/null) || true
    [[ ${installed##* } != "$2" ]] || return 0
    say "building $1 $2, once"
    cargo install "$1" --quiet --locked --version "$2" --root "$CACHE/tools"
}

one_of() { # WHAT VALUE ALLOWED...
    local what=$1 value=$2 allowed
    shift 2
    for allowed in "$@"; do
        [[ $value == "$allowed" ]] && return
    done
    die "no such $what: '$value' (known: $*)"
}

k8s_bin() { echo "$CACHE/bin/kubernetes-$1"; }
containerd_bin() { echo "$CACHE/bin/containerd-$1"; }

# What containerd's release is made with (its script/setup/runc-version).
runc_version() { # CONTAINERD_VERSION
    case $1 in
    1.*) echo 1.3.6 ;;
    *) echo 1.5.2 ;;
    esac
}
runc_bin() { echo "$CACHE/bin/runc-$(runc_version "$1")"; } # CONTAINERD_VERSION

# In /tmp anybody may have been first, and what is in there is run by root.
must_be_ours() { # DIR
    [[ ! -L $1 && $(stat -c %u "$1") == @(0|"$EUID") ]] || die "$1 is somebody else's; set REPRISE_NODES"
}

# Runs a function in a subshell while no other run of these scripts holds that lock. Nothing that
# lives on may be started in it: it would inherit the lock.
with_lock() { # FILE FUNCTION ARGS...
    local file=$1
    shift
    mkdir -p "$(dirname "$file")"
    (
        if ! flock --nonblock 9; then
            say "waiting for another run, which holds $file" >&2
            flock 9
        fi
        "$@"
    ) 9>"$file"
}
