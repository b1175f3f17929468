#!/usr/bin/env bash
# What hack/vm-test.sh does inside its machine: pods, what is seen of them, and faults. One call is one step.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib config units machine process; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done
NODE=$(basename "$REPRISE_NODES"/*)
readonly NODE
readonly DIR=$REPRISE_NODES/$NODE
# What the pods write down here outlives the machine's crash.
readonly EVIDENCE=/var/lib/vm-test
readonly ALWAYS=(etcd apiserver controller-manager containerd kubelet)
readonly STATE=/var/lib/reprise

# The unit that is shipped, started with the machine; what it is told is where this node has its things.
install_plugin() { # FILE
    install "$1" /usr/bin/reprise
    cp "$HERE/../deploy/reprise.service" "$UNITS/"
    mkdir -p "$UNITS/reprise.service.d"
    cat >"$UNITS/reprise.service.d/node.conf" <<END
[Unit]
After=reprise-$NODE-containerd.service
[Service]
ExecStart=
ExecStart=/usr/bin/reprise run --wait --nri-socket $NRI_SOCKET --cri-endpoint $CRI_ENDPOINT --kubeconfig $PLUGIN_KUBECONFIG \\
    --node-name $NODE_NAME --static-pod-path $STATIC_POD_PATH --log-level debug
END
    # As on a node that nobody plays scenarios on.
    local component
    for component in "${ALWAYS[@]}"; do
        mkdir -p "$UNITS/reprise-$NODE-$component.service.d"
        printf '[Service]\nRestart=always\nRestartSec=2\n' >"$UNITS/reprise-$NODE-$component.service.d/always.conf"
    done
    systemctl daemon-reload
    systemctl --quiet enable reprise
    systemctl restart reprise
    wait_for 30 "plugin that is connected" plugin_is_ready
}

# Whether the plugin has logged such a line since the boot. All is read: whoever stops early ends journalctl by a signal, which
# pipefail takes for a failure.
has_logged() { # PATTERN [JOURNALCTL_ARG]...
    journalctl -q -b -u reprise -o cat "${@:2}" | grep "$1" >/dev/null
}

plugin_is_ready() { has_logged 'connected to NRI' _PID="$(systemctl show -P MainPID reprise)"; }

remove_plugin() {
    systemctl disable --quiet --now reprise || true
    rm -rf "$UNITS/reprise.service" "$UNITS/reprise.service.d" "$UNITS/reprise-$NODE-"*.service.d
    systemctl daemon-reload
}

# A container writes down each of its starts with the boot that it is in, exits with 42 when it is asked to, and with
# STOPPED if it is told to stop.
STOPPED=43
container() { # POD CONTAINER
    cat <<END
  - name: $2
    image: $BUSYBOX_IMAGE
    volumeMounts: [{name: evidence, mountPath: /evidence}]
    command: [/bin/sh, -c]
    args:
    - |
      : in-vm-$1-$2-end
      trap 'exit $STOPPED' TERM
      echo "\$(cat /proc/sys/kernel/random/boot_id) \$(cut -d. -f1 /proc/uptime)" >>/evidence/$2.starts
      [ -p /evidence/$2.ask ] || mkfifo /evidence/$2.ask
      read -r _ </evidence/$2.ask
      exit 42
END
}

# Two containers that may ask, an init container and, except under Never, a sidecar.
pod() { # NAME POLICY [ANNOTATION]...
    local name=$1 policy=$2 line
    shift 2
    cat <<END
apiVersion: v1
kind: Pod
metadata:
  name: $name
  labels: {app: in-vm}
  annotations:
    restart-rules.reprise.dev: '[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]'
END
    for line in "$@"; do
        echo "    $line"
    done
    cat <<END
spec:
  nodeName: $NODE_NAME
  restartPolicy: $policy
  terminationGracePeriodSeconds: 1
  volumes:
  - name: evidence
    hostPath: {path: $EVIDENCE/$name, type: DirectoryOrCreate}
  initContainers:
  - name: init
    image: $BUSYBOX_IMAGE
    volumeMounts: [{name: evidence, mountPath: /evidence}]
    command: [/bin/sh, -c]
    args: ['cat /proc/sys/kernel/random/boot_id >>/evidence/init.starts']
END
    if [[ $policy != Never ]]; then
        container "$name" side
        echo "    restartPolicy: Always"
    fi
    echo "  containers:"
    container "$name" a
    container "$name" b
}

k() { "$KUBECTL" --kubeconfig "$KUBECONFIG" "$@"; }

make_pods() { # NAME:POLICY...
    local pod name
    for pod in "$@"; do
        name=${pod%:*}
        rm -rf "$EVIDENCE/${name:?}"
        pod "$name" "${pod#*:}" \
            ${BACK_OFF:+"restart-options.reprise.dev: '{backOff: {firstSeconds: $BACK_OFF}}'"}
        echo ---
    done | k apply -f -
    for pod in "$@"; do
        wait_for 60 "pod ${pod%:*} that runs" runs "${pod%:*}"
        keep_counts "${pod%:*}"
    done
}

# Between the end of their first restart and the second.
make_pods_that_wait() { # SECONDS NAME:POLICY...
    BACK_OFF=$1 make_pods "${@:2}"
}

# How often containers were restarted, to see later that it is not less.
keep_counts() { # POD
    restart_counts "$1" >"$EVIDENCE/$1/counts"
}

counts_are_kept() { # POD
    restart_counts "$1" | cat "$EVIDENCE/$1/counts" - | awk '$1 in count && $2 < count[$1] {exit 1} {count[$1] = $2}'
}

delete_pods() {
    k delete pod -l app=in-vm --timeout=300s
    rm -rf "$EVIDENCE"
}

# After a check that has failed.
clean_up() {
    ! grep -q "$OF_CHECKS" "$DIR/kubelet.yaml" || kubelet_with
    delete_pods
}

# Restarts the kubelet with these settings beside the node's, in place of those of another check.
OF_CHECKS='^singleProcessOOMKill\|^shutdownGracePeriod'
kubelet_with() { # LINE...
    sed -i "/$OF_CHECKS/d" "$DIR/kubelet.yaml"
    (($# == 0)) || printf '%s\n' "$@" >>"$DIR/kubelet.yaml"
    systemctl restart "reprise-$NODE-kubelet"
    wait_for 120 "healthy kubelet" kubelet_healthy
}

# Where the API server answers at all, all of a pod's containers run and none waits or was never started.
runs() { # POD
    api "/api/v1/namespaces/default/pods/$1" | jq -e '.status.phase == "Running" and
        ([.status.containerStatuses[], (.status.initContainerStatuses[] | select(.state.terminated.exitCode != 0))]
            | all(.state.running != null))'
}

# The first processes of a container; what they fork is called the same for a moment.
instances() { # POD CONTAINER
    local pid
    for pid in $(pgrep -f "^/bin/sh -c : in-vm-$1-$2-end"); do
        ! grep -qs "^NSpid:.*[[:space:]]1$" "/proc/$pid/status" || echo "$pid"
    done
}

restart_counts() { # POD
    api "/api/v1/namespaces/default/pods/$1" |
        jq -r '.status | (.containerStatuses[], .initContainerStatuses[]?) | "\(.name) \(.restartCount)"'
}

ask() { # POD CONTAINER
    wait_for 60 "$1's $2, to be asked" test -p "$EVIDENCE/$1/$2.ask"
    # shellcheck disable=SC2016 # the inner shell's own argument
    timeout 300 sh -c 'echo >"$0"' "$EVIDENCE/$1/$2.ask" || fail "$1's $2 does not listen"
}

ask_all() { # POD:POLICY...
    local pod
    for pod in "$@"; do
        keep_counts "${pod%:*}"
        ask "${pod%:*}" a
    done
}

starts() { # POD CONTAINER
    wc -l <"$EVIDENCE/$1/$2.starts"
}

has_started() { # POD CONTAINER TIMES
    (($(starts "$1" "$2") >= $3))
}

containers_of() { # POLICY
    echo a b
    [[ $1 == Never ]] || echo side
}

# One after another: all containers of a pod start once more.
restart_and_check() { # POD:POLICY...
    local pod name container began before since
    for pod in "$@"; do
        name=${pod%:*}
        before=$(starts "$name" b) began=$SECONDS
        since=$(date '+%F %T')
        ask "$name" a
        for container in init $(containers_of "${pod#*:}"); do
            wait_for 60 "new start of $name's $container" has_started "$name" "$container" $((before + 1))
        done
        echo "measured: $name restarted in $((SECONDS - began)) s"
        await_well 60 "$pod"
        # On an emulated machine a replay may take too long, and what it has started is started afresh.
        ! fell_back "$name" "$since" || continue
        for container in init $(containers_of "${pod#*:}"); do
            (($(starts "$name" "$container") == before + 1)) || fail "$name's $container started more than once"
        done
    done
}

fell_back() { # POD TIME
    has_logged "beginning anew.*pod=default/$1 " --since "$2"
}

fail() {
    echo "$*"
    exit 1
}

# Restarts of all at once, and that long after it of a part of the node.
restart_with_fault() { # COMPONENT MILLISECONDS POD:POLICY...
    local component=$1 delay=$2 pod name container
    declare -A before
    shift 2
    for pod in "$@"; do
        before[$pod]=$(starts "${pod%:*}" b)
    done
    ask_all "$@"
    sleep_ms "$delay"
    systemctl restart "reprise-$NODE-$component"
    await_well 120 "$@"
    for pod in "$@"; do
        name=${pod%:*}
        if [[ $pod == *:Never ]] && has_ended "$name"; then
            echo "measured: $name has failed, or was given up"
            continue
        fi
        for container in $(containers_of "${pod#*:}"); do
            has_started "$name" "$container" $((before[$pod] + 1)) || fail "$name's $container was not started again"
        done
    done
}

sleep_ms() { sleep "$(printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)))"; }

# Replaces pods that have ended: a Never pod does with its machine.
renew_ended() { # POD:POLICY...
    local pod
    for pod in "$@"; do
        has_ended "${pod%:*}" || continue
        echo "measured: ${pod%:*} has failed"
        k delete pod "${pod%:*}" --timeout=300s
        make_pods "$pod"
    done
}

# Restarts in a row, of which the second waits: the first is over by then.
into_back_off() { # POD
    local times
    times=$(($(restarts_over "$1") + 1))
    ask "$1" a
    wait_for 60 "restart that is over" are_over "$1" "$times"
    ask "$1" a
    wait_for 30 "back-off" in_back_off "$1"
}

restarts_over() { # POD
    journalctl -q -b -u reprise -o cat | grep "all containers run again" | grep -c "pod=default/$1\b" || true
}

are_over() { # POD TIMES
    (($(restarts_over "$1") >= $2))
}

in_back_off() { # POD
    has_logged "backing off pod=default/$1 "
}

# A pod whose container `eater` takes all memory that it may have when it is asked to: by a process of its own, beside
# the shell.
make_eater() { # CONDITION
    rm -rf "${EVIDENCE:?}/eater"
    # shellcheck disable=SC2016 # the container's own variables
    pod eater Always | sed -e "s/exitCodes: {.*\[42\]}/$1/" -e '/- name: a$/a\    resources: {requests: {memory: 16Mi}, limits: {memory: 48Mi}}' \
        -e 's|^      exit 42|      tail /dev/zero; echo "$? $(cut -d. -f1 /proc/uptime)" >>/evidence/survived; sleep 10; exit 42|' |
        k apply -f -
    wait_for 60 "pod eater that runs" runs eater
    keep_counts eater
}

cgroup_of() { # POD CONTAINER FILE
    cat "/sys/fs/cgroup$(cut -d: -f3 "/proc/$(instances "$1" "$2")/cgroup")/$3"
}

limits_of() { # POD CONTAINER
    local file
    for file in memory.max memory.high memory.oom.group cpu.weight pids.max; do
        echo "$file $(cgroup_of "$1" "$2" "$file")"
    done | paste -sd ' '
}

# All of a container's processes go with the one that the kernel chooses (memory.oom.group).
oom_kill() {
    local before now
    make_eater 'onOOMKilled: {}'
    before=$(limits_of eater a)
    ask eater a
    wait_for 60 "new start" has_started eater b 2
    await_well 60 eater:Always
    now=$(limits_of eater a)
    echo "measured: $now"
    [[ $now == "$before" ]] || fail "it was: $before"
    [[ $now == *"memory.oom.group 1"* ]] || fail "memory.oom.group is not set"
    [[ $now != *"memory.high max"* ]] || fail "memory.high is not set"
    [[ ! -e $EVIDENCE/eater/survived ]] || fail "its shell has outlived it"
    api /api/v1/namespaces/default/pods/eater | jq -e '.status.containerStatuses[] | select(.name == "a") |
        .lastState.terminated | .reason == "OOMKilled" and .exitCode == 137' || fail "the status says nothing of it"
}

# A kubelet that lets the others live: the shell sees it, nothing restarts until the shell asks.
oom_kill_of_one() {
    kubelet_with 'singleProcessOOMKill: true'
    make_eater 'exitCodes: {operator: In, values: [42]}'
    ask eater a
    wait_for 60 "end of one process" test -s "$EVIDENCE/eater/survived"
    [[ $(cut -d ' ' -f 1 "$EVIDENCE/eater/survived") == 137 ]] || fail "it ended with $(cat "$EVIDENCE/eater/survived")"
    sleep 5
    [[ $(starts eater b) == 1 ]] || fail "the pod restarted when one process ended"
    wait_for 60 "new start" has_started eater b 2
    await_well 60 eater:Always
    kubelet_with
}

# Pods that answer SIGTERM with the code that asks for a restart, under a kubelet that ends its pods before the machine
# shuts down.
prepare_shutdown() {
    kubelet_with 'shutdownGracePeriod: 120s' 'shutdownGracePeriodCriticalPods: 10s'
    wait_for 60 "kubelet that wants to be asked" systemd_inhibited
    STOPPED=42
    make_pods always:Always never:Never
}

systemd_inhibited() { systemd-inhibit --list --no-pager | grep -q kubelet; }

after_shutdown() {
    local pod container
    for pod in always:Always never:Never; do
        wait_for 120 "end of ${pod%:*}" has_ended "${pod%:*}"
        api "/api/v1/namespaces/default/pods/${pod%:*}" | jq -r '.status | "measured: \(.phase) \(.reason) \(.message)"'
        for container in $(containers_of "${pod#*:}"); do
            [[ $(starts "${pod%:*}" "$container") == 1 ]] || fail "${pod%:*}'s $container was started again"
        done
    done
    wait_for 30 "end of all records" no_records
    kubelet_with
}

# What a plugin without anything to do takes: its pods run.
measure_idle() { # MINUTES
    local minutes=$1 pid kubelet ticks kubelets wakes rss
    make_pods always:Always never:Never
    sleep 20
    pid=$(systemctl show -P MainPID reprise) kubelet=$(systemctl show -P MainPID "reprise-$NODE-kubelet")
    ticks=$(cpu_ticks "$pid") kubelets=$(cpu_ticks "$kubelet") wakes=$(wakeups "$pid") rss=$(resident "$pid")
    sleep $((minutes * 60))
    ticks=$(($(cpu_ticks "$pid") - ticks)) kubelets=$(($(cpu_ticks "$kubelet") - kubelets))
    wakes=$((($(wakeups "$pid") - wakes) / minutes))
    echo "measured: over $minutes min: $((ticks * 10)) ms of CPU, the kubelet $((kubelets * 10)) ms, $wakes wake-ups a minute," \
        "resident $rss KiB before, $(resident "$pid") KiB after"
    # What a core is worth that is emulated, the kubelet shows, which has the same pods.
    ((ticks * 5 <= kubelets)) || fail "more than a fifth of the kubelet's CPU"
    # Most of it is the executable. The kernel gives huge pages to all who do not refuse them.
    ((rss <= 20480)) || fail "more than 20 MiB"
    ((wakes <= 600)) || fail "more than ten wake-ups a second"
    (($(resident "$pid") <= rss + rss / 10)) || fail "it grows"
    delete_pods
}

cpu_ticks() { awk '{print $14 + $15}' "/proc/$1/stat"; } # PID
wakeups() { cat "/proc/$1"/task/*/status | awk '/^voluntary_ctxt/ {all += $2} END {print all}'; }
resident() { awk '/^VmRSS/ {print $2}' "/proc/$1/status"; }

# --- as people have it

runtime_socket() { echo "${CRI_ENDPOINT#unix://}"; }

# Sockets, the kubelet's directory and the API server's address for pods, as they are where nobody says otherwise.
to_usual_places() { # API_SERVER
    [[ $NRI_SOCKET == "$DIR/nri/nri.sock" ]] || return 0
    k delete pods --all --all-namespaces --timeout=300s
    systemctl stop "reprise-$NODE-kubelet" "reprise-$NODE-containerd"
    sed -i "s|$DIR/containerd.sock|/run/containerd/containerd.sock|; s|$DIR/nri/nri.sock|/var/run/nri/nri.sock|
        s|--root-dir=$DIR/kubelet|--root-dir=/var/lib/kubelet|" "$DIR"/{containerd.toml,kubelet.yaml,env,run/kubelet.sh}
    systemctl start "reprise-$NODE-containerd"
    # shellcheck source=/dev/null
    source "$DIR/env"
    wait_for 60 "containerd" cri_ready containerd
    systemctl start "reprise-$NODE-kubelet"
    wait_for 120 "healthy kubelet" kubelet_healthy
    # What kube-proxy does elsewhere, for the one service that there is.
    sysctl -q net.ipv4.ip_forward=1
    iptables -t nat -A PREROUTING -d "$SERVICE_IP" -p tcp --dport 443 -j DNAT --to-destination "$1"
    iptables -t nat -A POSTROUTING -d "${1%:*}" -j MASQUERADE
}

# What docs/install.md says of the unit, and docs/upgrade.md of its end.
package_installs_and_removes() { # FILE POD:POLICY...
    local file=$1 dir pod
    declare -A before
    shift
    dpkg --install "$file"
    ! systemctl --quiet is-active reprise || fail "it starts by itself"
    cmp /etc/reprise/config.yaml "$HERE/../deploy/config.yaml"
    printf 'kubeconfig: %s\nnode-name: %s\n' "$PLUGIN_KUBECONFIG" "$NODE_NAME" >>/etc/reprise/config.yaml
    systemctl enable --now reprise
    wait_for 30 "plugin that is connected" plugin_is_ready
    make_pods "$@"
    restart_and_check "$@"
    KUBECONFIG=$KUBECONFIG "$KUBECTL" reprise restart "${1%:*}" --wait --timeout 5m
    await_well 60 "$@"
    # Again, in the middle of restarts: the new one goes on with them, under the configuration that was changed.
    for pod in "$@"; do
        before[$pod]=$(starts "${pod%:*}" b)
    done
    ask_all "$@"
    dpkg --install "$file"
    await_well 120 "$@"
    for pod in "$@"; do
        has_started "${pod%:*}" b $((before[$pod] + 1)) || fail "${pod%:*} was not restarted"
    done
    grep -q "^node-name" /etc/reprise/config.yaml || fail "its configuration is lost"
    dpkg --remove reprise
    [[ ! -e /usr/bin/reprise && -e /etc/reprise/config.yaml ]] || fail "it should be gone but for its configuration"
    await_well 30 "$@"
    ! conditions_of "$@" | grep reprise || fail "conditions stay"
    dpkg --purge reprise
    for dir in /run/reprise /var/lib/reprise /etc/reprise; do
        [[ ! -e $dir ]] || fail "$dir is left: $(find "$dir" | head)"
    done
    delete_pods
}

conditions_of() { # POD:POLICY...
    local pod
    for pod in "$@"; do
        api "/api/v1/namespaces/default/pods/${pod%:*}" | jq -r '.status.conditions[].type'
    done
}

# Containers that the runtime has in that state, by the CRI's own list: 0 created, 1 running. One more than the frame's
# five bytes is a container.
in_state() { # STATE
    local answer=$DIR/containers request='\x00\x00\x00\x00\x04\x0a\x02\x12\x00'
    [[ $1 == 0 ]] || request="\\x00\\x00\\x00\\x00\\x06\\x0a\\x04\\x12\\x02\\x08\\x0$1"
    printf '%b' "$request" | curl -sS --max-time 20 --http2-prior-knowledge --unix-socket "${CRI_ENDPOINT#unix://}" \
        -H 'content-type: application/grpc' -H 'te: trailers' --data-binary @- \
        http://cri/runtime.v1.RuntimeService/ListContainers >"$answer" || return
    tail -c +6 "$answer" | tr -c '[:print:]' '\n' |
        grep -A1 -x 'io.kubernetes.\(container\|pod\).name' | grep -v 'io.kubernetes\|^--' || true
}

held_exits() { pgrep -fc 'reprise[^ ]* hook' || true; }

no_records() { [[ -z $(ls "$STATE/restarts" 2>/dev/null) ]]; }

# What must be so when the dust has settled.
is_well() { # POD:POLICY...
    local pod name policy container created
    for pod in "$@"; do
        name=${pod%:*} policy=${pod#*:}
        if [[ $policy == Never ]] && has_ended "$name"; then
            continue # the kubelet's own verdict on a Never pod whose containers died with the machine
        fi
        runs "$name" >/dev/null && counts_are_kept "$name" || return
        for container in a b $([[ $policy == Never ]] || echo side); do
            (($(instances "$name" "$container" | wc -l) == 1)) || return
        done
    done
    created=$(in_state 0) || return
    [[ -z $created && $(held_exits) == 0 ]] && no_records
}

# Or it was given up, as the plugin says: an emulated machine whose runtime starts once more makes no placeholders in time.
has_ended() { # POD
    local now
    now=$(api "/api/v1/namespaces/default/pods/$1") || return
    jq -e '.status.phase == "Failed" or .status.phase == "Succeeded"' <<<"$now" >/dev/null ||
        has_logged "gave up: the runtime did not make placeholders in time.*pod=default/$1 " \
            --since "$(jq -r '.metadata.creationTimestamp | fromdate | "@\(.)"' <<<"$now")"
}

# Waits until all is well, then looks again: it must stay so.
await_well() { # SECONDS POD:POLICY...
    local began=$SECONDS
    (wait_for "$1" "return of the pods" is_well "${@:2}") || {
        show "${@:2}"
        return 1
    }
    echo "well after $((SECONDS - began)) s, $(cut -d. -f1 /proc/uptime) s after the boot"
    sleep 10
    is_well "${@:2}" || {
        echo "and then not any more"
        show "${@:2}"
        return 1
    }
}

show() { # POD:POLICY...
    local pod
    k get pods -o wide || true
    for pod in "$@"; do
        api "/api/v1/namespaces/default/pods/${pod%:*}" | jq -c '.status | .phase, .reason, (.containerStatuses[],
            .initContainerStatuses[]?| {name, restartCount, state, lastState})' || true
        for container in a b side; do
            echo "${pod%:*} $container: $(instances "${pod%:*}" "$container" | wc -l) instances"
        done
        tail -n 5 "$EVIDENCE/${pod%:*}"/*.starts || true
    done
    echo "created and not started: $(in_state 0 | paste -sd ' ')"
    echo "held: $(held_exits), records: $(find "$STATE/restarts" -type f | paste -sd ' ')"
    journalctl -q -b -u reprise -o cat | tail -n 40
}

# shellcheck source=/dev/null
source "$DIR/settings"
SLOT=$(cat "$DIR/slot")
# shellcheck source=/dev/null
source "$DIR/env"
"$@"
