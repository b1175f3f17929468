#!/usr/bin/env bash
# Measures the plugin on a real node beside the kubelet's own restart of all containers, and takes the
# node down whatever happens. Tables on standard output, progress on standard error.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"
readonly NODE=bench$$

usage() {
    cat <<END
usage: hack/bench.sh [ARG]...
ROUNDS=10                     of each pod, in each way
K8S=$DEFAULT_K8S CONTAINERD=$DEFAULT_CONTAINERD
ARG...                        for the runner, see cargo bench --bench speed -- --help
END
}

# shellcheck disable=SC2317 # called by a trap
take_down() {
    [[ ! -d ${REPRISE_NODES:-/tmp/reprise-nodes}/$NODE ]] || "$HERE/node.sh" down "$NODE" >&2
    rm -rf "$WORK"
}

# The runner is a process group of its own, to be ended with the plugin that it runs.
# shellcheck disable=SC2317 # called by a trap
interrupted() {
    trap - INT TERM
    local job
    for job in $(jobs -p); do
        kill -- "-$job" 2>/dev/null || true
    done
    wait || true
    exit 130
}

main() {
    cd "$HERE/.."
    local runner arch
    arch=$(dpkg --print-architecture)
    say "building the plugin as it is shipped, and the runner" >&2
    "$HERE/image.sh" --arch "$arch" >&2
    REPRISE_BIN=$PWD/target/image-$arch/$arch/reprise
    runner=$(cargo test --bench speed --no-run --message-format=json-render-diagnostics |
        jq -r 'select(.executable != null and .target.name == "speed") | .executable')
    export REPRISE_BIN

    local versions=(--k8s "${K8S:-$DEFAULT_K8S}" --containerd "${CONTAINERD:-$DEFAULT_CONTAINERD}")
    "$HERE/node.sh" build "${versions[@]}" >&2
    WORK=$(mktemp -d)
    trap take_down EXIT
    trap interrupted INT TERM
    "$HERE/node.sh" up "$NODE" "${versions[@]}" >&2
    REPRISE_NODE_ENV=$("$HERE/node.sh" env "$NODE" | sed -n 's/^NODE_DIR=//p')/env
    export REPRISE_NODE_ENV

    set -m
    TMPDIR=$WORK "$runner" "$@" &
    wait $!
}

case ${1-} in
-h | --help) usage ;;
*) main "$@" ;;
esac
