# Builds Kubernetes, containerd and runc from their Go modules; installs what Debian has. Sourced.
# shellcheck shell=bash

readonly NRI_VERSION=0.12.5
readonly CRI_API_VERSION=0.37.2
readonly CONTAINERD_API_VERSION=1.12.0
readonly HELM_VERSION=4.3.1
readonly CRITEST_VERSION=1.37.0
# Prometheus 3.16.0, as its module is numbered.
readonly PROMETHEUS_VERSION=0.316.0
readonly JOBSET_VERSION=0.12.0

readonly NODE_PACKAGES=(etcd-server containernetworking-plugins busybox-static iproute2 procps jq openssl curl
    ca-certificates)
# gcc and libc6-dev: for the pause image, for runc, and for Rust to link with. g++: for libFuzzer.
readonly BUILD_PACKAGES=(gcc g++ libc6-dev libseccomp-dev pkg-config)

packages_missing() { # PACKAGE...
    local package
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
            echo "$package"
    done
}

ensure_packages() { # PACKAGE...
    [[ -z $(packages_missing "$@") ]] || with_lock "$CACHE/lock/packages" install_packages "$@"
}

apt_install() { # PACKAGE...
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" \
        >"$CACHE/apt.log" 2>&1
}

install_packages() { # PACKAGE...
    local missing policy=/usr/sbin/policy-rc.d made=
    mapfile -t missing < <(packages_missing "$@")
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    # etcd-server would start a service of its own; policy-rc.d 101 is Debian's way to forbid that.
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
        made=1
    fi
    local failed=0
    # A fresh machine has no package lists, and old lists name packages that are gone.
    apt_install "${missing[@]}" || { apt-get update -qq && apt_install "${missing[@]}"; } || failed=1
    [[ -z $made ]] || rm -f $policy
    ((!failed)) || die "apt-get failed, see $CACHE/apt.log"
}

# Fetches one module and prints a field of what `go mod download` says about it.
module() { # PATH@VERSION FIELD
    (cd / && go mod download -json "$1") | jq -er ".$2"
}

# `go build` in a module made for the occasion, a line of progress before and after each command. GO_COMMAND is another command
# of go's that builds.
go_build() { # DIR OUT LDFLAGS TAGS PACKAGE...
    local dir=$1 out=$2 ldflags=$3 tags=$4 package began command
    shift 4
    read -ra command <<<"${GO_COMMAND:-build}"
    for package in "$@"; do
        began=$SECONDS
        say "building $package"
        (cd "$dir" && CGO_ENABLED=${CGO:-0} GOFLAGS=-mod=mod GOWORK=off nice \
            go "${command[@]}" -trimpath -buildvcs=false -tags "$tags" -ldflags "-s -w $ldflags" \
            -o "$out/" "$package") >"$dir/log" 2>&1 || {
            tail -n 30 "$dir/log" >&2
            die "cannot build $package"
        }
        say "built $(basename "$package") in $((SECONDS - began)) s"
    done
}

# The module's own go.mod and go.sum pin every dependency; ours is theirs under another name,
# requiring them.
borrow_module() { # DIR PATH VERSION
    local dir=$1 path=$2 version=$3 source
    source=$(module "$path@v$version" Dir) || die "cannot fetch $path v$version"
    install -m 644 "$source/go.mod" "$source/go.sum" "$dir/"
    (cd "$dir" && go mod edit -module reprise.test/build -require "$path@v$version")
}

build_kubernetes() { # VERSION TEMP PROGRAM
    local version=$1 temp=$2 program=$3 minor staged
    minor=$(cut -d. -f2 <<<"$version")
    borrow_module "$temp/src" k8s.io/kubernetes "$version"
    # k8s.io/api and its like are directories in the release's source tree and modules v0.MINOR.PATCH
    # in the proxy.
    for staged in $(cd "$temp/src" && go mod edit -json |
        jq -r '.Replace[] | select(.New.Path | startswith("./staging")) | .Old.Path'); do
        (cd "$temp/src" && go mod edit -replace "$staged=$staged@v0.${version#*.}")
    done
    # Unstamped binaries call themselves v0.0.0 and refuse each other.
    local stamp=k8s.io/component-base/version
    go_build "$temp/src" "$temp/bin" "-X $stamp.gitVersion=v$version -X $stamp.gitMajor=1 \
        -X $stamp.gitMinor=$minor -X $stamp.gitTreeState=clean" "" \
        "k8s.io/kubernetes/cmd/$program"
}

build_containerd() { # VERSION TEMP
    local version=$1 temp=$2 path=github.com/containerd/containerd
    [[ $version == 1.* ]] || path+=/v2
    borrow_module "$temp/src" "$path" "$version"
    # An exclude or a replace holds for the main module alone, so it is wanted here as there; only a
    # replace by a directory of the source tree has no meaning outside it.
    local replaced
    for replaced in $(cd "$temp/src" && go mod edit -json |
        jq -r '.Replace // [] | .[] | select(.New.Path | startswith("./")) | .Old.Path'); do
        (cd "$temp/src" && go mod edit -dropreplace "$replaced")
    done
    go_build "$temp/src" "$temp/bin" "-X $path/version.Version=v$version" \
        "no_btrfs no_devmapper no_zfs urfave_cli_no_docs" \
        "$path"/cmd/{containerd,containerd-shim-runc-v2,ctr}
}

# Its first steps in a container are C.
build_runc() { # VERSION TEMP
    local version=$1 temp=$2 path=github.com/opencontainers/runc
    borrow_module "$temp/src" "$path" "$version"
    CGO=1 go_build "$temp/src" "$temp/bin" "-X main.version=$version" seccomp "$path"
}

build_helm() { # VERSION TEMP
    local version=$1 temp=$2 path=helm.sh/helm/v4
    borrow_module "$temp/src" "$path" "$version"
    go_build "$temp/src" "$temp/bin" "-X $path/internal/version.version=v$version" "" "$path/cmd/helm"
}

# Of Prometheus nothing else is wanted, and no discovery of targets, which is most of it.
build_of_prometheus() { # VERSION TEMP PROGRAM
    local version=$1 temp=$2 path=github.com/prometheus/prometheus
    borrow_module "$temp/src" "$path" "$version"
    go_build "$temp/src" "$temp/bin" "" remove_all_sd "$path/cmd/$3"
}

build_promtool() { build_of_prometheus "$1" "$2" promtool; } # VERSION TEMP

build_prometheus() { build_of_prometheus "$1" "$2" prometheus; } # VERSION TEMP

# The controller, the agent, and the definition of what the former controls.
build_jobset() { # VERSION TEMP
    local version=$1 temp=$2 path=sigs.k8s.io/jobset
    borrow_module "$temp/src" "$path" "$version"
    go_build "$temp/src" "$temp/bin" "" "" "$path" "$path/cmd/in-place-restart-agent"
    install -m 644 "$(module "$path@v$version" Dir)/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml" \
        "$temp/bin/crd.yaml"
}

# It is a test of its module, not a program.
build_critest() { # VERSION TEMP
    local version=$1 temp=$2 path=sigs.k8s.io/cri-tools
    borrow_module "$temp/src" "$path" "$version"
    GO_COMMAND='test -c' go_build "$temp/src" "$temp/bin" "-X $path/pkg/version.Version=v$version" "" "$path/cmd/critest"
}

# Builds into a directory of its own and renames it, or the one program in it that is wanted, at the
# end: what is there is whole.
build_once() { # TARGET FUNCTION VERSION [PROGRAM]
    local target=$1 function=$2 version=$3 program=${4:-} temp
    [[ -e $target ]] && return
    ensure_packages "${BUILD_PACKAGES[@]}"
    temp=$(mktemp -d "$CACHE/tmp.XXXXXX")
    # shellcheck disable=SC2064 # the local is gone when the lock's subshell ends
    trap "rm -rf '$temp'" EXIT
    mkdir -p "$temp/src" "$temp/bin" "$(dirname "$target")"
    "$function" "$version" "$temp" "$program"
    mv -T "$temp/bin/$program" "$target"
}

ensure() { # TARGET FUNCTION VERSION
    [[ -d $1 ]] || with_lock "$CACHE/lock/$(basename "$1")" build_once "$@"
}
ensure_containerd() { # VERSION
    ensure "$(containerd_bin "$1")" build_containerd "$1"
    ensure "$(runc_bin "$1")" build_runc "$(runc_version "$1")"
}

# Each program by itself: of some versions nothing but the kubelet is wanted.
ensure_kubernetes() { # VERSION PROGRAM...
    local dir program
    dir=$(k8s_bin "$1")
    for program in "${@:2}"; do
        [[ -e $dir/$program ]] || with_lock "$CACHE/lock/$(basename "$dir")" \
            build_once "$dir/$program" build_kubernetes "$1" "$program"
    done
}

helm_bin() { echo "$CACHE/bin/helm-$HELM_VERSION"; }

# For the chart alone; no node needs it.
ensure_helm() { ensure "$(helm_bin)" build_helm "$HELM_VERSION"; }

promtool_bin() { echo "$CACHE/bin/promtool-$PROMETHEUS_VERSION"; }

# For metrics.sh alone.
ensure_promtool() { ensure "$(promtool_bin)" build_promtool "$PROMETHEUS_VERSION"; }

prometheus_bin() { echo "$CACHE/bin/prometheus-$PROMETHEUS_VERSION"; }

# For the picture of metrics.sh alone.
ensure_prometheus() { ensure "$(prometheus_bin)" build_prometheus "$PROMETHEUS_VERSION"; }

jobset_bin() { echo "$CACHE/bin/jobset-$JOBSET_VERSION"; }

# For the scenarios of groups alone.
ensure_jobset() { ensure "$(jobset_bin)" build_jobset "$JOBSET_VERSION"; }

critest_bin() { echo "$CACHE/bin/critest-$CRITEST_VERSION"; }

# For critest.sh alone.
ensure_critest() { ensure "$(critest_bin)" build_critest "$CRITEST_VERSION"; }

copy_protos() { # _ TEMP, see build_once
    local temp=$2
    install -m 644 "$(module github.com/containerd/nri@v$NRI_VERSION Dir)/pkg/api/api.proto" \
        "$temp/bin/nri.proto"
    install -m 644 "$(module k8s.io/cri-api@v$CRI_API_VERSION Dir)/pkg/apis/runtime/v1/api.proto" \
        "$temp/bin/cri.proto"
    cp -r "$(module github.com/containerd/containerd/api@v$CONTAINERD_API_VERSION Dir)" \
        "$temp/bin/containerd"
    chmod -R u+w "$temp/bin/containerd"
}

protos_dir() { echo "$CACHE/protos-nri$NRI_VERSION-cri$CRI_API_VERSION-containerd$CONTAINERD_API_VERSION"; }

# Copies, so that they outlive `go clean -modcache`.
ensure_protos() { ensure "$(protos_dir)" copy_protos -; }

print_protos() {
    local dir
    ensure_protos >&2
    dir=$(protos_dir)
    printf 'nri=%s\ncri=%s\ncontainerd=%s\n' "$dir/nri.proto" "$dir/cri.proto" "$dir/containerd"
}
