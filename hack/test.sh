#!/usr/bin/env bash
# Everything there is to test: unit and integration tests, then the scenarios on real nodes, each with
# its own Kubernetes and containerd. Takes its nodes down whatever happens.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib crio; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done
# The oldest and the newest, to which the scenarios are dealt out. The old kubelet is under as new an API server as
# supports it: only there a pod's spec may have rules that its kubelet does not know.
readonly DEFAULT_NODES=(1.36.3/2.3.7/1.33.13 1.37.2/2.4.2)
# containerd 1.7 goes with the oldest kubelet, as it does in the field.
readonly MORE_NODES=(1.36.3/2.3.7 1.35.4/2.4.2 1.34.4/2.3.7 1.33.13/1.7.35)
# Played by --all where CRI-O's programs are.
readonly CRIO_NODES=(1.36.3/crio-1.36.3/1.33.13 1.36.3/crio-1.36.3)

# For each target; four minutes in all on two cores. `make fuzz` takes its time.
readonly FUZZ_SECONDS=60 FUZZ_SEED=5532

usage() {
    cat <<END
usage: hack/test.sh [OPTION]... [KUBERNETES[/RUNTIME[/KUBELET]]]...
RUNTIME is a version of containerd, or crio-VERSION.
  --all          all scenarios on all versions: ${DEFAULT_NODES[*]}
                 ${MORE_NODES[*]}
                 and, with the programs that CRIO names, ${CRIO_NODES[*]}
  --seed N       by which the scenarios are dealt out where no versions are given (default: drawn)
  --only-scenarios   no unit and integration tests
  --parts N      nodes of each version, which share the scenarios out among them (default 2)
  --at-once N    nodes side by side (default 4)
  --results DIR  keep the runner's output there, a file a node, for hack/conformance.sh
  -- ARG...      for the scenarios, see cargo test --test scenarios -- --help
With versions all scenarios on each. Without: each scenario that does not take long on one of ${DEFAULT_NODES[*]},
and on both what tells them apart.
END
}

say() { printf '%s %s\n' "$(date +%T)" "$*"; }

parse_options() {
    NODES=() RUNNER=() PARTS=2 AT_ONCE=4 UNIT=yes RESULTS='' DEALT='' SEED='' LEFT_OUT=''
    while (($#)); do
        case $1 in
        --all)
            NODES=("${DEFAULT_NODES[@]}" "${MORE_NODES[@]}")
            if has_crio "${CRIO_VERSIONS[0]}"; then
                NODES+=("${CRIO_NODES[@]}")
            else
                LEFT_OUT="not played: ${CRIO_NODES[*]}, for want of CRI-O's programs in $CRIO_PLACE"
            fi
            ;;
        --only-scenarios) UNIT=no ;;
        --seed) SEED=${2:?--seed needs a number} && shift ;;
        --results) mkdir -p "${2:?--results needs a directory}" && RESULTS=$(realpath "$2") && shift ;;
        --parts) PARTS=${2:?--parts needs a number} && shift ;;
        --at-once) AT_ONCE=${2:?--at-once needs a number} && shift ;;
        --)
            RUNNER=("${@:2}")
            break
            ;;
        -h | --help) usage && exit ;;
        -*) usage >&2 && exit 2 ;;
        */*) NODES+=("$1") ;;
        *) NODES+=("$1/$DEFAULT_CONTAINERD") ;;
        esac
        shift
    done
    if ((!${#NODES[@]})); then
        NODES=("${DEFAULT_NODES[@]}") DEALT=yes
        : "${SEED:=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"
    elif [[ -n $SEED ]]; then
        echo 'test.sh: with versions nothing is dealt out, by no seed' >&2 && exit 2
    fi
}

# What node.sh calls a node's versions.
version_options() { # VERSIONS
    local k8s runtime kubelet
    IFS=/ read -r k8s runtime kubelet <<<"$1"
    case $runtime in
    crio-*) runtime="--crio ${runtime#crio-}" ;;
    *) runtime="--containerd $runtime" ;;
    esac
    echo "--k8s $k8s $runtime ${kubelet:+--kubelet $kubelet}"
}

# Short and its own: somebody's node may run beside it.
node_name() { # INDEX PART
    echo "test$$-$1$2"
}

# shellcheck disable=SC2317 # called by a trap
take_down() {
    local index part name
    for index in "${!NODES[@]}"; do
        for ((part = 1; part <= PARTS; part++)); do
            name=$(node_name "$index" "$part")
            [[ ! -d ${REPRISE_NODES:-/tmp/reprise-nodes}/$name ]] || "$HERE/node.sh" down "$name" || true
        done
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

# What is played on differs by the kubelet first.
result_name() { # KUBERNETES/RUNTIME[/KUBELET]
    local kubernetes runtime kubelet
    IFS=/ read -r kubernetes runtime kubelet <<<"$1"
    [[ $runtime == crio-* ]] || runtime=containerd$runtime
    echo "${kubelet:-$kubernetes}-$runtime-kubernetes$kubernetes"
}

# Plays on one node what no other node of these versions has come to before. Its output is the runner's own, each line
# with the versions before it. Every second node plays those scenarios first that run one by one, so that its neighbour,
# which runs many at once, has the cores to itself.
test_node() { # INDEX PART
    local index=$1 part=$2 versions=${NODES[$1]} name options output began=$SECONDS code=0 order=()
    name=$(node_name "$index" "$part")
    output=$WORK/$index.$part
    mkdir -p "$WORK/$index.shares"
    ((part % 2 == 1)) || order=(--alone-first)
    [[ -z $DEALT ]] || order+=(--kind "$((index + 1))/${#NODES[@]}" --seed "$SEED")
    read -ra options < <(version_options "$versions")
    "$HERE/node.sh" up "$name" "${options[@]}" >"$output.env" || code=$?
    if ((code == 0)); then
        say "node $name is up"
        # Before the scenarios: its admission policies would refuse their pods.
        [[ $UNIT == no ]] || ((part > 1)) || REPRISE_NODE_ENV=$("$HERE/node.sh" env "$name" | sed -n 's/^NODE_DIR=//p')/env \
            "$HERE/chart.sh" check || code=1
        REPRISE_NODE_ENV=$("$HERE/node.sh" env "$name" | sed -n 's/^NODE_DIR=//p')/env \
            "$SCENARIOS" --share-out "$WORK/$index.shares" "${order[@]}" "${RUNNER[@]}" | tee "$output.out" || code=$?
        "$HERE/node.sh" down "$name" || code=1
        [[ -z $RESULTS ]] || cat "$output.out" >>"$RESULTS/$(result_name "$versions").out"
    fi
    # What failed, what there was to see of it, and the tally.
    {
        awk '/^[^ ]/ { left = /^FAILED / ? 80 : 0 } left-- > 0' "$output.out" 2>/dev/null || true
        sed -n '/^failed /,$p' "$output.out" 2>/dev/null | sed '$d'
        printf '%s, node %d of %d: %s, %d s\n' "$versions" "$part" "$PARTS" \
            "$(tail -n1 "$output.out" 2>/dev/null || echo 'no node')" \
            $((SECONDS - began))
    } >"$output.sum"
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

# The documents name the scenarios there are; and whoever checks that notices one too many and one too few.
check_conformance() {
    local list
    list=$("$SCENARIOS" --list)
    "$HERE/conformance.sh" check <<<"$list" || return
    if "$HERE/conformance.sh" check <<<"$list"$'\nin_no_table (Shared)' 2>/dev/null ||
        grep -v '^kubelet_alone_fails_a_never_pod ' <<<"$list" | "$HERE/conformance.sh" check 2>/dev/null; then
        say "conformance.sh check finds nothing"
        return 1
    fi
}

main() {
    parse_options "$@"
    WORK=$(mktemp -d)
    trap take_down EXIT
    trap interrupted INT TERM
    cd "$HERE/.."

    # jq and a C compiler are needed below.
    "$HERE/node.sh" packages
    "$HERE/versions.sh" || say "not known whether there are newer versions than these"

    local failed=0
    if [[ $UNIT == yes ]]; then
        say "unit and integration tests"
        cargo test --locked --quiet || failed=1
        say "fuzzing"
        "$HERE/fuzz.sh" --seconds "$FUZZ_SECONDS" --seed "$FUZZ_SEED" || failed=1
        say "our protocol definitions beside upstream's"
        compare_protos || failed=1
    fi

    say "building the scenarios"
    SCENARIOS=$(cargo test --locked --test scenarios --no-run --message-format=json |
        jq -r 'select(.executable != null and .target.name == "scenarios") | .executable')
    check_conformance || failed=1

    # One after another: their builds would only take the cores from each other.
    local versions options
    for versions in "${NODES[@]}"; do
        read -ra options < <(version_options "$versions")
        "$HERE/node.sh" build "${options[@]}"
    done
    "$HERE/node.sh" jobset
    [[ $UNIT == no ]] || "$HERE/chart.sh" build || failed=1

    [[ -z $DEALT ]] || say "each scenario on one of ${NODES[*]}, dealt out by seed $SEED"
    # Each job in a process group of its own, to be ended with all that it runs.
    set -m
    local index part
    for index in "${!NODES[@]}"; do
        for ((part = 1; part <= PARTS; part++)); do
            while (($(jobs -rp | wc -l) >= AT_ONCE)); do
                wait -n || failed=1
            done
            { test_node "$index" "$part" 2>&1 | sed -u "s|^|${NODES[$index]}  |"; } &
        done
    done
    while (($(jobs -p | wc -l))); do
        wait -n || failed=1
    done

    [[ -z $LEFT_OUT ]] || echo "$LEFT_OUT"
    cat "$WORK"/*.sum
    exit "$failed"
}

main "$@"
