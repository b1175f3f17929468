#!/usr/bin/env bash
# Everything there is to test: unit and integration tests, then the scenarios on real nodes, each with
# its own Kubernetes and containerd. Takes its nodes down whatever happens.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
readonly DEFAULT_NODES=(1.33.13/2.3.7 1.36.3/2.3.7)
# containerd 1.7 goes with the oldest kubelet, as it does in the field.
readonly MORE_NODES=(1.34.4/2.3.7 1.35.4/2.3.7 1.36.3/2.4.2 1.33.13/1.7.35)

usage() {
    cat <<END
usage: hack/test.sh [OPTION]... [KUBERNETES[/CONTAINERD]]...
  --all          on all versions: ${DEFAULT_NODES[*]}
                 ${MORE_NODES[*]}
  --only-scenarios   no unit and integration tests
  --at-once N    nodes side by side (default 2)
  -- ARG...      for the scenarios, see cargo test --test scenarios -- --help
Without versions: ${DEFAULT_NODES[*]}
END
}

say() { printf '%s %s\n' "$(date +%T)" "$*"; }

parse_options() {
    NODES=() RUNNER=() AT_ONCE=2 UNIT=yes
    while (($#)); do
        case $1 in
        --all) NODES=("${DEFAULT_NODES[@]}" "${MORE_NODES[@]}") ;;
        --only-scenarios) UNIT=no ;;
        --at-once) AT_ONCE=${2:?--at-once needs a number} && shift ;;
        --)
            RUNNER=("${@:2}")
            break
            ;;
        -h | --help) usage && exit ;;
        -*) usage >&2 && exit 2 ;;
        */*) NODES+=("$1") ;;
        *) NODES+=("$1/2.3.7") ;;
        esac
        shift
    done
    ((${#NODES[@]})) || NODES=("${DEFAULT_NODES[@]}")
}

# Short and its own: somebody's node may run beside it.
node_name() { # INDEX
    echo "test$$-$1"
}

# shellcheck disable=SC2317 # called by a trap
take_down() {
    local index
    for index in "${!NODES[@]}"; do
        [[ ! -d ${REPRISE_NODES:-/tmp/reprise-nodes}/$(node_name "$index") ]] ||
            "$HERE/node.sh" down "$(node_name "$index")" || true
    done
    rm -rf "$WORK"
}

# A signal ends the nodes' jobs too, so that none of them brings up what was just taken down.
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

# The scenarios on one node. Its output is the runner's own, each line with the versions before it.
test_node() { # INDEX
    local index=$1 versions=${NODES[$1]} name began=$SECONDS code=0
    name=$(node_name "$index")
    "$HERE/node.sh" up "$name" --k8s "${versions%/*}" --containerd "${versions#*/}" \
        >"$WORK/$index.env" || code=$?
    if ((code == 0)); then
        say "node $name is up"
        REPRISE_NODE_ENV=$("$HERE/node.sh" env "$name" | sed -n 's/^NODE_DIR=//p')/env \
            "$SCENARIOS" "${RUNNER[@]}" | tee "$WORK/$index.out" || code=$?
        "$HERE/node.sh" down "$name" || code=1
    fi
    printf '%s: %s, %d s\n' "$versions" \
        "$(tail -n1 "$WORK/$index.out" 2>/dev/null || echo 'no node')" \
        $((SECONDS - began)) >"$WORK/$index.sum"
    return "$code"
}

compare_protos() {
    local nri='' cri='' containerd=''
    # shellcheck source=/dev/null
    source <("$HERE/node.sh" protos)
    [[ -e $nri ]] || return
    REPRISE_UPSTREAM_NRI=$nri REPRISE_UPSTREAM_CRI=$cri REPRISE_UPSTREAM_CONTAINERD=$containerd \
        cargo test --locked --quiet --test wire -- --include-ignored
}

main() {
    parse_options "$@"
    WORK=$(mktemp -d)
    trap take_down EXIT
    trap interrupted INT TERM
    cd "$HERE/.."

    # jq and a C compiler are needed below.
    "$HERE/node.sh" packages

    local failed=0
    if [[ $UNIT == yes ]]; then
        say "unit and integration tests"
        cargo test --locked --quiet || failed=1
        say "our protocol definitions beside upstream's"
        compare_protos || failed=1
    fi

    say "building the scenarios"
    SCENARIOS=$(cargo test --locked --test scenarios --no-run --message-format=json |
        jq -r 'select(.executable != null and .target.name == "scenarios") | .executable')

    # One after another: their builds would only take the cores from each other.
    local versions
    for versions in "${NODES[@]}"; do
        "$HERE/node.sh" build --k8s "${versions%/*}" --containerd "${versions#*/}"
    done

    # Each job in a process group of its own, to be ended with all that it runs.
    set -m
    local index
    for index in "${!NODES[@]}"; do
        while (($(jobs -rp | wc -l) >= AT_ONCE)); do
            wait -n || failed=1
        done
        { test_node "$index" 2>&1 | sed -u "s|^|${NODES[$index]}  |"; } &
    done
    while (($(jobs -p | wc -l))); do
        wait -n || failed=1
    done

    cat "$WORK"/*.sum
    exit "$failed"
}

main "$@"
