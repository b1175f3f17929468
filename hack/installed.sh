#!/usr/bin/env bash
# The image and the chart as people install them, on a node that is up: a pod restarts through the DaemonSet, whose image is
# replaced while pods restart all the time, and when it is removed nothing is left on the node.
#
# On a node as people have them (hack/vm-guest.sh, to_usual_places) with the documents' own commands. Elsewhere everything is in
# other places, pods get no tokens and no service's address leads anywhere (hack/node.sh): the values say the former, the latter
# are added to the DaemonSet, and the Job of `helm uninstall` is done by hand.
#
# Many functions are called by name, which shellcheck does not see:
# shellcheck disable=SC2317,SC2153
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build process; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done

readonly NAMESPACE=kube-system NEXT=localhost/reprise:next
is_slow() { ((${REPRISE_PATIENCE:-1} > 1)); }
# Pods that restart while the plugin is replaced, and how often each does in all. None on a slow machine: exits can be held for
# 8 s, and there the next plugin takes almost as long to begin.
PODS=$(is_slow && echo 0 || echo 4)
readonly PODS RESTARTS=12
# Seconds for anything that is waited for: much more than it takes on a busy machine.
readonly PATIENCE=120

usage() {
    cat <<END
usage: hack/installed.sh [ARCHIVE]   ARCHIVE: the image (default: hack/image.sh makes one of this machine's architecture)
On a node of its own, or that of REPRISE_NODE_ENV=FILE. REPRISE_PATIENCE=N: wait N times as long for everything.
END
}

# Whether everything on the node is where releases have it.
is_usual() { [[ $NRI_SOCKET == /var/run/nri/nri.sock ]]; }

# Where things are on the node.
choose_places() {
    local ours=$NODE_DIR/installed
    if is_usual; then
        PODS_DIR=/var/lib/kubelet/pods HOOK_DIR=/opt/reprise RUN_DIR=/run/reprise STATE_DIR=/var/lib/reprise
    else
        PODS_DIR=$NODE_DIR/kubelet/pods HOOK_DIR=$ours/opt RUN_DIR=$ours/run STATE_DIR=$ours/state
    fi
}

# The command in a document that begins so, with an image that is on the node already.
documented() { # FILE BEGINNING
    local command
    command=$(sed -e 's|registry\.example\.com/reprise|localhost/reprise|' -e "s|image\.tag=NEW|image.tag=${NEXT##*:}|" \
        "$HERE/../$1" | grep -m 1 "^$2 ")
    say "$command"
    (cd "$HERE/.." && KUBECONFIG=$KUBECONFIG PATH=$(helm_bin):$PATH bash -c "$command" >/dev/null)
}

kube() { "$KUBECTL" --kubeconfig "$KUBECONFIG" "$@"; }

until_true() { # WHAT COMMAND...
    wait_for "$PATIENCE" "$@"
    say "$1"
}

# On a node that is not alone on its machine everything is somewhere else than the chart's values say.
values() {
    jq -n --arg nri "$NRI_SOCKET" --arg cri "${CRI_ENDPOINT#unix://}" --arg pods "$PODS_DIR" --arg static "$STATIC_POD_PATH" \
        --arg hook "$HOOK_DIR" --arg run "$RUN_DIR" --arg state "$STATE_DIR" \
        --arg shared "$(findmnt -no PROPAGATION -T "$NODE_DIR")" '{
        image: {name: "localhost/reprise", pullPolicy: "Never"},
        nri: {socket: $nri}, cri: {socket: $cri}, kubelet: {podsDir: $pods, staticPodPath: $static},
        directories: {hook: $hook, run: $run, state: $state},
        mountPropagation: (if $shared | contains("shared") then "HostToContainer" else "None" end),
        config: {"back-off": 0, "log-level": "debug"}}'
}

helm() { KUBECONFIG=$KUBECONFIG "$(helm_bin)/helm" --namespace $NAMESPACE "$@"; }

# The same executable under another digest.
import_images() {
    local work
    ctr -n k8s.io images import "$ARCHIVE" >/dev/null
    IMAGE=$(ctr -n k8s.io images ls -q | grep '^localhost/reprise:' | grep -vx "$NEXT" | tail -n 1)
    work=$(mktemp -d)
    tar -xf "$ARCHIVE" -C "$work"
    mkdir "$work/root"
    tar -xf "$work/blobs/sha256/$(layer_of "$work")" -C "$work/root"
    install -m 755 "$work/root/reprise" "$NODE_DIR/installed/"
    echo next >>"$work/root/reprise"
    (
        # What it calls images is what the node's env file does.
        # shellcheck source=/dev/null
        source "$HERE/images.sh"
        pack_image "$work/root" "$NEXT" /reprise "$work/next.tar"
    )
    ctr -n k8s.io images import "$work/next.tar" >/dev/null
    rm -rf "$work"
    say "images: $IMAGE and $NEXT"
}

layer_of() { # LAYOUT
    local digest
    blob() { jq -r "$1" "$2/blobs/sha256/${3#sha256:}"; }
    digest=$(jq -r '.manifests[0].digest' "$1/index.json")
    digest=$(blob ".manifests[] | select(.platform.architecture == \"$(dpkg --print-architecture)\").digest" "$1" "$digest")
    digest=$(blob '.layers[0].digest' "$1" "$digest")
    echo "${digest#sha256:}"
}

ctr() { "${CTR_COMMAND[@]}" "$@"; }

# A pod that writes down when its containers begin, and whose trainer asks for a restart every few seconds, COUNT times. On a slow
# machine it would fail under Never.
make_pod() { # NAME COUNT
    kube apply -f - >/dev/null <<END
apiVersion: v1
kind: Pod
metadata:
  name: $1
  annotations:
    restart-rules.reprise.dev/container.trainer: '[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]'
spec:
  nodeName: $NODE_NAME
  restartPolicy: $(is_slow && echo Always || echo Never)
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  volumes: [{name: work, emptyDir: {}}]
  containers:
    - name: trainer
      image: $BUSYBOX_IMAGE
      volumeMounts: [{name: work, mountPath: /work}]
      command: [sh, -c, 'echo trainer >>/work/began; [ \$(grep -c trainer /work/began) -gt $2 ] || { sleep 3; exit 42; }; sleep 1000000']
    - name: logger
      image: $BUSYBOX_IMAGE
      volumeMounts: [{name: work, mountPath: /work}]
      command: [sh, -c, 'echo logger >>/work/began; exec sleep 1000000']
END
}

# How often that container has begun, as it wrote down itself.
began() { # POD CONTAINER
    local uid
    uid=$(kube get pod "$1" -o jsonpath='{.metadata.uid}')
    grep -c "^$2\$" "$PODS_DIR/$uid/volumes/kubernetes.io~empty-dir/work/began"
}

# Exactly so often, where a replay has time enough: one that takes too long is begun anew.
has_restarted() { # POD COUNT
    if is_slow; then
        (($(began "$1" trainer) > $2 && $(began "$1" logger) > $2)) &&
            kube get pod "$1" -o json | jq -e --argjson count "$2" \
                '[.status.containerStatuses[] | .state.running and .restartCount >= $count] | all'
        return
    fi
    [[ $(began "$1" trainer) == $(($2 + 1)) && $(began "$1" logger) == $(($2 + 1)) ]] &&
        [[ $(kube get pod "$1" -o json | jq -c '[.status.containerStatuses[] | select(.state.running) | .restartCount]') == "[$2,$2]" ]]
}

# What the admission of service accounts, and kube-proxy, do elsewhere.
connect_to_cluster() {
    kube -n $NAMESPACE create configmap kube-root-ca.crt --from-file="ca.crt=$NODE_DIR/pki/ca.crt" \
        --dry-run=client -o json | kube apply -f - >/dev/null
    local port
    port=$(sed -n 's|.*server: https://127\.0\.0\.1:||p' "$KUBECONFIG")
    kube -n $NAMESPACE patch daemonset reprise --patch "$(jq -n --arg port "$port" '{spec: {template: {spec: {
        hostNetwork: true,
        volumes: [{name: "token", projected: {sources: [
            {serviceAccountToken: {path: "token", expirationSeconds: 3607}},
            {configMap: {name: "kube-root-ca.crt", items: [{key: "ca.crt", path: "ca.crt"}]}},
            {downwardAPI: {items: [{path: "namespace", fieldRef: {fieldPath: "metadata.namespace"}}]}}]}}],
        containers: [{name: "reprise",
            # Of the host they would be, and one pod at a time could have them.
            ports: null,
            readinessProbe: {httpGet: {port: 9808}}, livenessProbe: {httpGet: {port: 9808}},
            env: [{name: "KUBERNETES_SERVICE_HOST", value: "127.0.0.1"}, {name: "KUBERNETES_SERVICE_PORT", value: $port}],
            volumeMounts: [{name: "token", mountPath: "/var/run/secrets/kubernetes.io/serviceaccount", readOnly: true}]}]
    }}}}')" >/dev/null
}

install_chart() {
    if is_usual; then
        documented README.md "helm install"
    else
        values >"$NODE_DIR/installed/values.json"
        helm install reprise "$HERE/../deploy/chart" --values "$NODE_DIR/installed/values.json" \
            --set "image.tag=${IMAGE##*:}" >/dev/null
        connect_to_cluster
    fi
}

# What was added to the DaemonSet is not to be taken away again.
replace_image() {
    if is_usual; then
        documented docs/upgrade.md "helm upgrade"
    else
        kube -n $NAMESPACE set image daemonset/reprise "reprise=$NEXT" >/dev/null
    fi
}

remove_chart() {
    if is_usual; then
        documented docs/upgrade.md "helm uninstall"
    else
        "$NODE_DIR/installed/reprise" cleanup --all-nodes --daemonset $NAMESPACE/reprise --kubeconfig "$KUBECONFIG"
        helm uninstall reprise --no-hooks >/dev/null
    fi
}

# Its plugin says itself when it is connected (/readyz).
is_ready() { kube -n $NAMESPACE rollout status daemonset/reprise --watch=false | grep -q 'successfully rolled out'; }

plugin_pods() { kube -n $NAMESPACE get pods -l app.kubernetes.io/name=reprise -o jsonpath='{range .items[*]}{.metadata.name}{"\n"}{end}'; }

leaves_nothing() {
    local left=()
    [[ -z $(plugin_pods) ]] || left+=("pods of the plugin")
    local dir
    for dir in "$HOOK_DIR" "$RUN_DIR" "$STATE_DIR"; do
        [[ -z $(ls -A "$dir" 2>/dev/null) ]] || left+=("$(find "$dir" | head)")
    done
    local conditions
    conditions=$(kube get pods -A -o json | jq -r '[.items[].status.conditions[]?.type
        | select(test("^reprise.dev/|ContainersRestarting|PodRestarting"))] | unique | join(" ")')
    [[ -z $conditions ]] || left+=("conditions: $conditions")
    local unstarted
    unstarted=$(kube get pods -A -o json | jq -r '[.items[].status.containerStatuses[]? | select(.state.running | not) | .name] | join(" ")')
    [[ -z $unstarted ]] || left+=("containers that do not run: $unstarted")
    ((!${#left[@]})) || die "left: ${left[*]}"
    say "nothing is left on the node, and all pods run"
}

clean_up() {
    local code=$?
    trap - EXIT INT TERM
    if ((code)) && [[ -n ${KUBECTL-} ]]; then
        kube get pods -A -o wide >&2 || true
        # Not of the API server, which may not reach the kubelet.
        tail -n 20 "$KUBELET_LOGS/$NAMESPACE"_reprise-*/reprise/*.log >&2 || true
    fi
    [[ -n $OWN_NODE ]] || forget
    [[ -z $OWN_NODE ]] || "$HERE/node.sh" down "$OWN_NODE" || code=1
    exit "$code"
}

# On a node that stays.
forget() {
    is_usual || kube -n $NAMESPACE delete configmap kube-root-ca.crt --ignore-not-found >/dev/null 2>&1 || true
    helm uninstall reprise --no-hooks >/dev/null 2>&1 || true
    kube delete pods --all --grace-period 1 --wait=false >/dev/null 2>&1 || true
    rm -rf "$NODE_DIR/installed"
}

main() {
    ARCHIVE='' OWN_NODE=''
    while (($#)); do
        case $1 in
        -h | --help) usage && exit ;;
        -*) usage >&2 && exit 2 ;;
        *) ARCHIVE=$1 ;;
        esac
        shift
    done
    if [[ -z $ARCHIVE ]]; then
        ARCHIVE=$(own_image)
    fi
    [[ -f $ARCHIVE ]] || die "no such file: $ARCHIVE"
    if [[ -z ${REPRISE_NODE_ENV-} ]]; then
        OWN_NODE=inst$$
        trap clean_up EXIT
        trap 'exit 130' INT TERM
        "$HERE/node.sh" up "$OWN_NODE"
        REPRISE_NODE_ENV=$("$HERE/node.sh" env "$OWN_NODE" | sed -n 's/^NODE_DIR=//p')/env
    fi
    # shellcheck source=/dev/null
    source "$REPRISE_NODE_ENV"
    CTR_COMMAND=("$CTR" --address "${CRI_ENDPOINT#unix://}")
    ensure_helm
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    choose_places
    mkdir -p "$NODE_DIR/installed"

    import_images
    # The rights of a plugin that is no DaemonSet (hack/node.sh): here they come with the chart.
    kube delete --ignore-not-found -f "$HERE/../deploy/kustomize/base/rbac.yaml" >/dev/null
    [[ $(kube get nodes -o json | jq '.items | length') == 1 ]] || die "the node is not alone in its cluster"
    "$HERE/node.sh" start "$(basename "$NODE_DIR")" scheduler >/dev/null 2>&1 || true
    install_chart
    until_true "the DaemonSet's plugin is ready" is_ready

    make_pod once 1
    until_true "a pod has restarted in place, once" has_restarted once 1
    local pod
    for ((pod = 1; pod <= PODS; pod++)); do make_pod "busy-$pod" $RESTARTS; done
    ((PODS == 0)) || until_true "$PODS pods restart one after another" began "busy-$PODS" logger
    local before
    before=$(plugin_pods)
    replace_image
    replaced() { [[ $(plugin_pods) != *"$before"* ]] && is_ready; }
    until_true "the plugin was replaced meanwhile" replaced
    for ((pod = 1; pod <= PODS; pod++)); do
        until_true "busy-$pod has restarted $RESTARTS times, each container exactly" has_restarted "busy-$pod" $RESTARTS
    done
    make_pod after 1
    until_true "a pod has restarted by the new plugin, once" has_restarted after 1
    is_slow || [[ $(began once trainer) == 2 ]] || die "a pod restarted that nobody asked for"
    local copies
    copies=$(find "$HOOK_DIR" -name 'reprise-*' | wc -l)
    ((copies == 2)) || die "$copies hooks: that of the pod from before and the new one should be there"

    remove_chart
    leaves_nothing
    say "installed, upgraded and removed"
}

main "$@"
