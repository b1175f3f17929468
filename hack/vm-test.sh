#!/usr/bin/env bash
# What only a machine of its own can show, and scenarios on systemd and cgroup v2: in a virtual machine (hack/vm.sh), which
# is taken down whatever happens. The last line is that of hack/test.sh.
# shellcheck disable=SC2317 # checks are called by name
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done

readonly CONTROL_PLANES=${REPRISE_NODES:-/tmp/reprise-nodes}
readonly CHECKS=(
    pods_restart_under_systemd
    restarts_outlive_systemctl_restart_containerd
    restarts_outlive_systemctl_restart_kubelet
    an_oom_kill_restarts_the_pod
    one_process_killed_of_several_restarts_nothing
    pods_come_back_from_reboots
    pods_come_back_from_crashes
    a_back_off_ends_with_the_boot
    a_shutdown_of_the_node_restarts_nothing
    an_idle_plugin_is_quiet
)
# After the scenarios: they change where the node has things, and whose rights there are.
readonly PACKAGE=the_package_installs_and_removes CHART=the_chart_installs_upgrades_and_removes
# The pods of most checks, a name and a policy each.
readonly PODS=(never:Never always:Always failing:OnFailure)

usage() {
    cat <<END
usage: hack/vm-test.sh [OPTION]... [CHECK]...
  --debian V                        the machine's, see hack/vm.sh
  --k8s V, --kubelet V, --containerd V    the node's, see hack/node.sh
  --plugin FILE, --runner FILE      executables of the plugin and of the scenarios (default: built)
  --image FILE                      the archive that the chart is played with (default: hack/image.sh makes it)
  --package FILE                    the Debian package (default: hack/package.sh makes it)
  --seed N                          from which instants are drawn (default: drawn)
  --rounds N                        reboots and crashes (default 2)
  --idle MINUTES                    for which the idle plugin is measured (default 5)
  --scenarios TEXT,...|all|none     those whose name contains one of these (default: never_pod,always)
  --keep NAME                       the machine's name; it is used if it is there, and stays
CHECKs, all by default:
$(printf '  %s\n' "${CHECKS[@]}" $PACKAGE $CHART)
END
}

parse_options() {
    MACHINE=test$$ KEEP='' OF_MACHINE=() VERSIONS=() PLUGIN='' RUNNER='' IMAGE='' DEB='' SEED='' ROUNDS=2 IDLE=5
    SCENARIOS=never_pod,always WANTED=()
    while (($#)); do
        case $1 in
        -h | --help) usage && exit ;;
        -*) (($# > 1)) || die "$1 needs a value" ;;
        esac
        case $1 in
        --debian) OF_MACHINE+=("$1" "$2") ;;
        --k8s | --kubelet | --containerd) VERSIONS+=("$1" "$2") ;;
        --plugin) PLUGIN=$(realpath "$2") ;;
        --runner) RUNNER=$(realpath "$2") ;;
        --image) IMAGE=$(realpath "$2") ;;
        --package) DEB=$(realpath "$2") ;;
        --seed) SEED=$2 ;;
        --rounds) ROUNDS=$2 ;;
        --idle) IDLE=$2 ;;
        --scenarios) SCENARIOS=$2 ;;
        --keep) MACHINE=$2 KEEP=yes ;;
        -*) usage >&2 && die "unknown option '$1'" ;;
        *)
            one_of check "$1" "${CHECKS[@]}" $PACKAGE $CHART
            WANTED+=("$1") && shift && continue
            ;;
        esac
        shift 2
    done
    ((${#WANTED[@]})) || WANTED=("${CHECKS[@]}" "$PACKAGE" "$CHART")
    : "${SEED:=$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')}"
}

vm() { "$HERE/vm.sh" "$@"; }
inside() { vm ssh "$MACHINE" "$(printf '%q ' "$HERE/vm-guest.sh" "$@")"; }

plays() { [[ " ${WANTED[*]} " == *" $1 "* ]]; } # CHECK

build() {
    local messages
    if [[ -z $IMAGE ]] && plays $CHART; then
        IMAGE=$(own_image)
    fi
    if [[ -z $DEB ]] && plays $PACKAGE; then
        "$HERE/package.sh" "$WORK/package"
        DEB=$(ls "$WORK"/package/*.deb)
    fi
    [[ -z $IMAGE ]] || ensure_helm
    [[ $SCENARIOS != all ]] || ensure_jobset
    [[ -n $PLUGIN && -n $RUNNER ]] && return
    say "building the plugin and the scenarios"
    messages=$(cd "$HERE/.." && cargo build --locked --release --bin reprise --message-format=json &&
        cargo test --locked --test scenarios --no-run --message-format=json)
    executable() { jq -r --arg name "$1" 'select(.executable != null and .target.name == $name) | .executable' <<<"$messages" | head -n 1; }
    : "${RUNNER:=$(executable scenarios)}" "${PLUGIN:=$(executable reprise)}"
}

bring_up() {
    # Under names that do not change.
    ln -s "$PLUGIN" "$WORK/reprise"
    ln -s "$RUNNER" "$WORK/scenarios"
    local added=(--add "$WORK/reprise" --add "$WORK/scenarios")
    if [[ -n $IMAGE ]]; then
        ln -s "$IMAGE" "$WORK/reprise.oci.tar"
        added+=(--add "$WORK/reprise.oci.tar")
    fi
    if [[ -n $DEB ]]; then
        ln -s "$DEB" "$WORK/reprise.deb"
        added+=(--add "$WORK/reprise.deb")
    fi
    # As in a cluster, it is not on the node: an emulated machine is slow enough without.
    local dir began
    "$HERE/node.sh" up "$MACHINE" "${VERSIONS[@]}" --control-plane-only \
        --service-accounts --feature-gates MemoryQoS=true >"$WORK/env"
    dir=$CONTROL_PLANES/$MACHINE
    vm up "$MACHINE" "${OF_MACHINE[@]}" "${VERSIONS[@]}" --reach "$(api_address | cut -d: -f2)" "${added[@]}"
    began=$SECONDS
    tar -C "$dir" -cf - pki admin.kubeconfig controller-manager.kubeconfig kubelet.kubeconfig plugin.kubeconfig |
        vm ssh "$MACHINE" "mkdir -p /root/join && tar -C /root/join -xf -"
    vm ssh "$MACHINE" "'$HERE/node.sh' up $MACHINE ${VERSIONS[*]} --join $(api_address) /root/join --feature-gates MemoryQoS=true"
    say "the node was ready after $((SECONDS - began)) s"
}

# --- checks: each leaves the node without pods and the plugin running

with_pods() { # CHECK...
    inside make_pods "${PODS[@]}"
    # Not in a condition either.
    "$@"
    inside delete_pods
}

# In milliseconds: within what a restart takes on a slow machine, and more. Whatever else is played, the same.
instant() { # CHECK ROUND
    local sum
    read -r sum _ < <(cksum <<<"$SEED $1 $2")
    echo $((sum % 15000))
}

pods_restart_under_systemd() { with_pods inside restart_and_check "${PODS[@]}"; }

restarts_outlive_systemctl_restart_containerd() { with_pods inside restart_with_fault containerd "$(instant containerd 1)" "${PODS[@]}"; }
restarts_outlive_systemctl_restart_kubelet() { with_pods inside restart_with_fault kubelet "$(instant kubelet 1)" "${PODS[@]}"; }

pods_come_back_from_reboots() { with_pods lose_power reboot; }
pods_come_back_from_crashes() { with_pods lose_power crash; }

# Asks for restarts, and lets the machine go down at an instant that follows.
lose_power() { # reboot|crash
    local round instant
    for ((round = 1; round <= ROUNDS; round++)); do
        instant=$(instant "$1" "$round")
        say "round $round of $ROUNDS: $1 $instant ms after a restart was asked for"
        inside ask_all "${PODS[@]}"
        inside sleep_ms "$instant"
        go_down "$1"
        inside await_well 120 "${PODS[@]}"
        # A Never pod may have failed with the machine; the next round wants one that runs.
        inside renew_ended "${PODS[@]}"
    done
}

go_down() { # reboot|crash
    case $1 in
    reboot) vm reboot "$MACHINE" ;;
    crash) vm crash "$MACHINE" && vm start "$MACHINE" ;;
    esac
}

# Longer than an emulated machine takes to restart a pod.
a_back_off_ends_with_the_boot() {
    inside make_pods_that_wait 200 "${PODS[@]}"
    in_back_off
    inside delete_pods
}

in_back_off() {
    local how
    for how in reboot crash; do
        inside into_back_off always
        go_down "$how"
        inside await_well 120 "${PODS[@]}"
        inside renew_ended "${PODS[@]}"
    done
}

an_oom_kill_restarts_the_pod() { inside oom_kill && inside delete_pods; }
one_process_killed_of_several_restarts_nothing() { inside oom_kill_of_one && inside delete_pods; }

a_shutdown_of_the_node_restarts_nothing() {
    inside prepare_shutdown
    vm reboot "$MACHINE"
    inside after_shutdown && inside delete_pods
}

an_idle_plugin_is_quiet() { inside measure_idle "$IDLE"; }

the_package_installs_and_removes() {
    inside remove_plugin
    inside to_usual_places "$(api_address)"
    # A Never pod may fail on a machine that takes seconds to make a container.
    inside package_installs_and_removes /payload/bin/reprise.deb always:Always failing:OnFailure
}

# What the machine calls the API server outside.
api_address() { echo "$OUTSIDE:$(sed -n 's|^ *server: .*:||p' "$CONTROL_PLANES/$MACHINE/admin.kubeconfig")"; }

# As the README says, on a node without a plugin.
the_chart_installs_upgrades_and_removes() {
    inside remove_plugin
    inside to_usual_places "$(api_address)"
    # A run before may have left one.
    "$HERE/node.sh" stop "$MACHINE" scheduler 2>/dev/null || true
    "$HERE/node.sh" start "$MACHINE" scheduler
    vm ssh "$MACHINE" "REPRISE_NODE_ENV=/var/lib/reprise-nodes/$MACHINE/env '$HERE/installed.sh' /payload/bin/reprise.oci.tar"
}

# --- the run

check() { # NAME
    local began=$SECONDS code=0
    # Not in a condition: the first step that fails ends it.
    set +e
    (set -e && "$1") >"$WORK/output" 2>&1
    code=$?
    set -e
    if ((code == 0)); then
        PASSED=$((PASSED + 1))
        printf 'ok      %6d s  %s\n' $((SECONDS - began)) "$1"
        grep '^measured' "$WORK/output" | sed 's/^/  /' || true
    else
        FAILED=$((FAILED + 1))
        printf 'FAILED  %6d s  %s\n' $((SECONDS - began)) "$1"
        sed 's/^/  /' "$WORK/output"
        vm ssh "$MACHINE" true || vm start "$MACHINE" || true
        inside clean_up >/dev/null 2>&1 || true
    fi
}

play_scenarios() {
    local filter=() tally passed failed skipped
    [[ $SCENARIOS != none ]] || return 0
    [[ $SCENARIOS == all ]] || IFS=, read -ra filter <<<"$SCENARIOS"
    inside remove_plugin
    vm ssh "$MACHINE" "REPRISE_BIN=/payload/bin/reprise REPRISE_NODE_ENV=/var/lib/reprise-nodes/$MACHINE/env \
        /payload/bin/scenarios --jobs 1 ${filter[*]}" | tee "$WORK/scenarios.out" || true
    tally=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$WORK/scenarios.out" | tail -n 1) || true
    [[ -n $tally ]] || {
        FAILED=$((FAILED + 1))
        return
    }
    read -r passed _ failed _ skipped _ <<<"$tally"
    PASSED=$((PASSED + passed)) FAILED=$((FAILED + failed)) SKIPPED=$((SKIPPED + skipped))
}

# shellcheck disable=SC2317 # called by a trap
take_down() {
    if [[ -z $KEEP ]]; then
        vm down "$MACHINE" || true
        [[ ! -d $CONTROL_PLANES/$MACHINE ]] || "$HERE/node.sh" down "$MACHINE" || true
    fi
    rm -rf "$WORK"
}

main() {
    parse_options "$@"
    WORK=$(mktemp -d)
    trap take_down EXIT
    trap 'exit 130' INT TERM
    PASSED=0 FAILED=0 SKIPPED=0
    if ! vm list | grep -q "^$MACHINE "; then
        build
        "$HERE/node.sh" build "${VERSIONS[@]}"
        bring_up
    fi
    inside install_plugin /payload/bin/reprise
    say "instants are drawn from seed $SEED"
    local name
    for name in "${WANTED[@]}"; do
        [[ $name == @("$PACKAGE"|"$CHART") ]] || check "$name"
    done
    play_scenarios
    for name in $PACKAGE $CHART; do
        ! plays "$name" || check "$name"
    done
    echo "$PASSED passed, $FAILED failed, $SKIPPED skipped"
    ((FAILED == 0))
}

main "$@"; exit
