#!/usr/bin/env bash
# A pod restarts in place before your eyes, on a node of its own; then the same pod is deleted and
# created again, for comparison. Fails if anything that it is about to show does not happen.
# K8S=VERSION chooses another kubelet. By default the oldest: it cannot do this itself.
#
# Many functions are called by name, which shellcheck does not see:
# shellcheck disable=SC2317
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
readonly K8S=${K8S:-1.33.13} CONTAINERD=${CONTAINERD:-2.3.7}
readonly NODE=demo$$
readonly INITS=(fetch) SIDECARS=(metrics) REGULARS=(trainer server)
readonly LASTING=("${SIDECARS[@]}" "${REGULARS[@]}")
readonly CONTAINERS=("${INITS[@]}" "${LASTING[@]}")
# Seconds for anything that is waited for: much more than it takes on a busy machine.
readonly PATIENCE=60

if [[ -t 1 ]]; then
    readonly BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' GREEN=$'\e[32m' PLAIN=$'\e[0m'
else
    readonly BOLD='' DIM='' RED='' GREEN='' PLAIN=''
fi

title() { printf '\n%s%s%s\n' "$BOLD" "$*" "$PLAIN"; }

die() {
    printf '%serror: %s%s\n' "$RED" "$*" "$PLAIN" >&2
    exit 1
}

# --- what runs meanwhile --------------------------------------------------------------------------

PLUGIN='' PRODUCERS=()

# The pipelines that feed `follow`, each in a process group of its own, and nothing else.
stop_producers() {
    local group
    for group in "${PRODUCERS[@]}"; do
        kill -- "-$group" 2>/dev/null || true
        wait "$group" 2>/dev/null || true
    done
    PRODUCERS=()
}

clean_up() {
    local code=$?
    trap - EXIT INT TERM
    title "Cleaning up"
    stop_producers
    if [[ -n $PLUGIN ]]; then
        kill "$PLUGIN" 2>/dev/null || true
        wait "$PLUGIN" 2>/dev/null || true
    fi
    [[ ! -d ${REPRISE_NODES:-/tmp/reprise-nodes}/$NODE ]] ||
        "$HERE/node.sh" down "$NODE" | indented || code=1
    rm -rf "$WORK"
    exit "$code"
}

indented() { sed -u "s/^# \(.*\)/  $DIM\1$PLAIN/"; }

bring_up_node() {
    title "A node with Kubernetes $K8S and containerd $CONTAINERD"
    [[ -d ${REPRISE_CACHE:-$HOME/.cache/reprise}/bin/kubernetes-$K8S ]] ||
        echo "  It is built from source now. That takes some ten minutes, once."
    "$HERE/node.sh" build --k8s "$K8S" --containerd "$CONTAINERD" | indented
    "$HERE/node.sh" up "$NODE" --k8s "$K8S" --containerd "$CONTAINERD" | grep '^#' | indented
    # shellcheck source=/dev/null
    source <("$HERE/node.sh" env "$NODE")
    export KUBECONFIG
}

# The release build if it is there and of this very code, else the quicker one.
build_plugin() {
    local target
    target=$(cargo metadata --locked --no-deps --format-version 1 | jq -r .target_directory)
    BINARY=$target/release/reprise
    if [[ ! -x $BINARY || -n $(find src protos nri build.rs Cargo.toml Cargo.lock -newer "$BINARY") ]]; then
        cargo build --locked --quiet
        BINARY=$target/debug/reprise
    fi
}

start_plugin() {
    title "The plugin"
    build_plugin
    : >"$WORK/plugin.log" # the process below may not have made it when it is first looked at
    "$BINARY" run --nri-socket "$NRI_SOCKET" --cri-endpoint "$CRI_ENDPOINT" \
        --kubeconfig "$PLUGIN_KUBECONFIG" --node-name "$NODE_NAME" \
        --run-dir "$WORK/run" --state-dir "$WORK/state" >"$WORK/plugin.log" 2>&1 &
    PLUGIN=$!
    await "plugin's connection" connected
    echo "  reprise run, process $PLUGIN: connected to containerd over NRI"
}

connected() {
    plugin_runs
    grep -q 'connected to NRI' "$WORK/plugin.log"
}

plugin_runs() {
    kill -0 "$PLUGIN" 2>/dev/null || {
        tail -n 5 "$WORK/plugin.log" >&2
        die "the plugin ended"
    }
}

await() { # WHAT COMMAND...
    local what=$1 deadline=$((SECONDS + PATIENCE))
    shift
    until "$@"; do
        ((SECONDS < deadline)) || die "no $what within $PATIENCE s"
        sleep 0.05
    done
}

kubectl() { "$KUBECTL" "$@"; }

# --- what the pod does ----------------------------------------------------------------------------

# Hundredths of a second since the machine's start: the clock that the containers write down, too.
now() {
    local up
    read -r up _ </proc/uptime
    echo "${up/./}"
}

seconds() { # HUNDREDTHS
    printf '%d.%02d' $(($1 / 100)) $(($1 % 100))
}

# A piece of the story: when, who, what. Before the moment that times count from, without a time.
tell() { # AT WHO WHAT
    local at='' who=$2 line
    [[ -z $ZERO ]] || at="+$(seconds $(($1 - ZERO < 0 ? 0 : $1 - ZERO))) s"
    while read -r line; do
        printf '  %10s  %s%-8s%s  %s\n' "$at" "$DIM" "$who" "$PLAIN" "$line"
        at='' who=''
    done < <(fold -s -w 76 <<<"$3")
}

apply_pod() {
    sed "s/^  nodeName: NODE$/  nodeName: $NODE_NAME/" "$HERE/demo/pod.yaml" | kubectl apply -f - >/dev/null
    POD_UID=$(kubectl get pod demo -o 'jsonpath={.metadata.uid}')
    EMPTY_DIR=$NODE_DIR/kubelet/pods/$POD_UID/volumes/kubernetes.io~empty-dir/work
}

# Lets three sources write to one pipe: the containers' own log, the plugin's, and the API's watch. A
# tick wakes the reader when all are silent: `read -t` could lose the beginning of a line.
watch_pod() {
    declare -gA BEGINNINGS=() BEGAN_AT=()
    ORDER=() PHASES=() API_LINE='' ALL_READY='' RESTARTED=''
    set -m
    { while sleep 1; do echo tick; done >&7; } &
    PRODUCERS+=($!)
    { kubectl get pod demo --watch --output-watch-events -o json |
        jq --unbuffered -r --from-file "$HERE/demo/status.jq" | sed -u 's/^/api /' >&7; } 2>/dev/null &
    PRODUCERS+=($!)
    await "first line of the pod" test -s "$EMPTY_DIR/log"
    { tail -n +1 -f "$EMPTY_DIR/log" | sed -u 's/^/container /' >&7; } 2>/dev/null &
    PRODUCERS+=($!)
    { tail -n 0 -f "$WORK/plugin.log" | grep --line-buffered 'pod=default/demo' |
        sed -u 's/^/plugin /' >&7; } 2>/dev/null &
    PRODUCERS+=($!)
    set +m
}

follow() { # CONDITION WHAT
    local deadline=$((SECONDS + PATIENCE)) source line
    until "$1"; do
        ((SECONDS < deadline)) || die "not seen within $PATIENCE s: $2"
        read -r -u 7 source line
        "hear_$source" "$line"
    done
}

hear_tick() { plugin_runs; }

hear_container() { # UPTIME NAME WORDS...
    local at name words
    read -r at name words <<<"$1"
    at=${at/./}
    case $words in
    begins*)
        BEGINNINGS[$name]=$((${BEGINNINGS[$name]:-0} + 1))
        BEGAN_AT[$name]=$at
        ORDER+=("$name")
        ;;
    completed) ORDER+=("$name-completed") ;;
    step*) [[ -z $ZERO ]] || return 0 ;; # enough of them
    "exits with 42") ZERO=$at ;;
    esac
    tell "$at" "$name" "$words"
}

hear_plugin() { # LINE
    local said
    said=$(sed -E 's/^[^ ]+ +[A-Z]+ +//; s/ pod=[^ ]+//; s/ restart=[^ ]+//' <<<"$1")
    tell "$(now)" reprise "$said"
}

hear_api() { # PHASE READY RESTARTED LINE
    local phase ready restarted line
    IFS=$'\t' read -r phase ready restarted line <<<"$1"
    PHASES+=("$phase")
    ALL_READY=$ready RESTARTED=$restarted
    [[ $line != "$API_LINE" ]] || return 0
    API_LINE=$line
    tell "$(now)" API "$line"
}

ready() { [[ $ALL_READY == true && $RESTARTED == false ]] && all_began 1; }
exited() { [[ -n $ZERO ]]; }
runs_again() { [[ $ALL_READY == true && $RESTARTED == true ]] && all_began 2; }

all_began() { # TIMES
    local name
    for name in "${CONTAINERS[@]}"; do
        ((${BEGINNINGS[$name]:-0} >= $1)) || return
    done
}

# When the last container that stays began.
last_beginning() {
    local name last=0
    for name in "${LASTING[@]}"; do
        ((BEGAN_AT[$name] <= last)) || last=${BEGAN_AT[$name]}
    done
    echo "$last"
}

field() { # JSONPATH
    kubectl get pod demo -o "jsonpath={$1}"
}

sandboxes() {
    "$CTR" -a "${CRI_ENDPOINT#unix://}" -n k8s.io containers list -q \
        "labels.\"io.kubernetes.pod.uid\"==$POD_UID,labels.\"io.cri-containerd.kind\"==sandbox" \
        2>>"$WORK/ctr.log" # warnings about this machine's cgroups, every time
}

declare -A FACT=()

# All that is to be compared, as it is now: before the restart, after it, or of the pod made anew.
note() { # before|after|anew
    FACT[$1.uid]=$(field .metadata.uid)
    FACT[$1.ip]=$(field .status.podIP)
    FACT[$1.sandbox]=$(sandboxes)
    FACT[$1.begins]=$(grep 'trainer begins' "$EMPTY_DIR/log" | tail -n 1)
    FACT[$1.order]="${ORDER[*]}"
    FACT[$1.restarts]=$(field '.status.initContainerStatuses[*].restartCount')
    FACT[$1.restarts]+=" $(field '.status.containerStatuses[*].restartCount')"
    FACT[$1.phases]=$(printf '%s\n' "${PHASES[@]}" | sort -u | paste -sd,)
    FACT[$1.exit]=$(field '.status.containerStatuses[?(@.name=="trainer")].lastState.terminated.exitCode')
    FACT[$1.previous]=$(kubectl logs demo -c trainer --previous 2>/dev/null | tail -n 1) || true
}

# --- the two ways ---------------------------------------------------------------------------------

restart_in_place() {
    title "A pod: init container ${INITS[*]}, sidecar ${SIDECARS[*]}, trainer and server"
    sed -n '/^    restart-rules/,/\]$/s/^  */  /p' "$HERE/demo/pod.yaml"
    echo
    ZERO=''
    apply_pod
    watch_pod
    follow ready "the pod becomes ready"
    note before
    printf '  %10s  %s\n' '' "UID ${FACT[before.uid]}, IP ${FACT[before.ip]}, sandbox ${FACT[before.sandbox]:0:12}"
    follow exited "the trainer exits"
    PHASES=()
    follow runs_again "all containers run again, and the API shows it"
    READY_AFTER=$(($(now) - ZERO))
    RUN_AFTER=$(($(last_beginning) - ZERO))
    note after
    stop_producers
    title "kubectl get pod demo"
    kubectl get pod demo | sed 's/^/  /'
}

recreate() {
    title "The same pod, deleted and created again"
    ZERO=$(now)
    tell "$ZERO" kubectl "delete pod demo (default grace period; all containers end on SIGTERM)"
    kubectl delete pod demo >/dev/null
    tell "$(now)" kubectl "the pod is gone: apply -f pod.yaml"
    apply_pod
    watch_pod
    follow ready "the pod becomes ready"
    READY_ANEW=$(($(now) - ZERO))
    RUN_ANEW=$(($(last_beginning) - ZERO))
    note anew
    stop_producers
}

# --- the account ----------------------------------------------------------------------------------

FAILED=0

row() { # WHAT IN_PLACE ANEW
    printf '  %-34s %-28s %s\n' "$@"
}

# The same with a verdict on the middle column: it must be what was expected.
checked() { # EXPECTED WHAT IN_PLACE ANEW
    local verdict="${GREEN}ok   $PLAIN"
    [[ $3 == "$1" ]] || {
        verdict="${RED}WRONG$PLAIN"
        FAILED=$((FAILED + 1))
    }
    printf '  %-34s %-22s %b %s\n' "$2" "$3" "$verdict" "$4"
}

# Whether a fact of the first pod is still one: kept or new.
kept() { # after|anew NAME
    if [[ -n ${FACT[before.$2]} && ${FACT[$1.$2]} == "${FACT[before.$2]}" ]]; then echo kept; else echo new; fi
}

# How often all containers began, in start order; anything else is "not in order".
rounds() { # after|anew
    local round="${INITS[*]} ${INITS[*]}-completed ${SIDECARS[*]} (trainer server|server trainer)"
    if [[ ${FACT[$1.order]} =~ ^$round$ ]]; then
        echo once
    elif [[ ${FACT[$1.order]} =~ ^$round\ $round$ ]]; then
        echo twice
    else
        echo "not in order"
    fi
}

# The phases of the restart without those that end a pod. Pending is none: its init containers run.
unless_over() {
    local phases=${FACT[after.phases]//Failed/}
    echo "${phases//Succeeded/}"
}

account() {
    title "$(row "Kubernetes $K8S" "restarted in place" "deleted, created again")"
    row "until all containers run" "$(seconds "$RUN_AFTER") s after the exit" \
        "$(seconds "$RUN_ANEW") s after the command"
    row "until the API shows them ready" "$(seconds "$READY_AFTER") s" "$(seconds "$READY_ANEW") s"
    checked kept "UID" "$(kept after uid)" "$(kept anew uid)"
    checked kept "IP" "$(kept after ip)" "$(kept anew ip)"
    checked kept "sandbox" "$(kept after sandbox)" "$(kept anew sandbox)"
    checked "after step 6" "emptyDir: trainer goes on" "${FACT[after.begins]#* begins }" "${FACT[anew.begins]#* begins }"
    checked twice "${INITS[*]}, ${SIDECARS[*]}, others, in order" "$(rounds after)" "$(rounds anew)"
    checked "1 1 1 1" "restartCount of all four" "${FACT[after.restarts]}" "${FACT[anew.restarts]}"
    checked "$(unless_over)" "phases, not Failed or Succeeded" "${FACT[after.phases]}" "${FACT[anew.phases]}"
    checked 42 "lastState: trainer's exit code" "${FACT[after.exit]}" "${FACT[anew.exit]:-none}"
    checked "trainer exits with 42" "logs --previous end with" "${FACT[after.previous]#* }" "${FACT[anew.previous]:-none}"
    cat <<TEXT

  Both columns: one pod, one node, images there already, first line of the last container to start.
  Outside this node, a new pod also waits for its controller and the scheduler.
TEXT
    ((!FAILED)) || die "$FAILED of these did not happen as they should"
}

main() {
    ((EUID == 0)) || die "make demo must be root: it runs a node of its own on this machine"
    command -v cargo >/dev/null || die "make demo needs Rust (https://rustup.rs)"
    command -v go >/dev/null || die "make demo needs Go (https://go.dev/dl)"
    cd "$HERE/.."
    WORK=$(mktemp -d)
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    mkfifo "$WORK/news"
    exec 7<>"$WORK/news"
    bring_up_node
    start_plugin
    restart_in_place
    recreate
    account
}

# Bash reads a script as it goes; it must not go on in one that has changed meanwhile.
main "$@"; exit
