#!/usr/bin/env bash
# The chart in deploy/chart, and what is made from it. See README.md beside this file.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done
readonly CHART=$HERE/../deploy/chart KUSTOMIZE=$HERE/../deploy/kustomize
readonly NAMESPACES=(labelled named other)
# No kubelet is behind these.
readonly NODES=(reprise-check-here reprise-check-there)

usage() {
    cat <<END
usage: chart.sh build       build helm, which takes minutes, and kubectl
       chart.sh generate    write the files in deploy/kustomize that are made from the chart
       chart.sh check [--if-built]
                            lint and render the chart, and whether these files are up to date;
                            with REPRISE_NODE_ENV (hack/node.sh) also on that node's API server.
                            --if-built: where helm is not built, say so, and no more
END
}

helm() { "$(helm_bin)/helm" "$@"; }
kubectl() { "${KUBECTL:-$(k8s_bin "$DEFAULT_K8S")/kubectl}" "$@"; }

build() {
    ensure_helm
    ensure_kubernetes "$DEFAULT_K8S" kubectl
}

render() { # ARGS...
    helm template reprise "$CHART" --namespace kube-system "$@"
}

# Of one template, without what is Helm's own.
plain() { # TEMPLATE ARGS...
    echo '# From deploy/chart, by hack/chart.sh generate.'
    render --show-only "templates/$1.yaml" "${@:2}" |
        sed -e '/^# Source: /d' -e '/^ *helm\.sh\/chart:/d' -e '/^ *app\.kubernetes\.io\/managed-by:/d' \
            -e '/^ *annotations:$/,/\(hook-delete-policy\|checksum\/config\):/d' -e '/^$/d' |
        sed -e '1{/^---$/d}'
}

generate() { # DIR
    plain rbac >"$1/base/rbac.yaml"
    plain daemonset >"$1/base/daemonset.yaml"
    plain config | sed -e '1,/^  config\.yaml: /d' -e 's/^    //' >"$1/base/config.yaml"
    plain cleanup >"$1/cleanup/job.yaml"
    plain hard-reset --set hardReset.enabled=true >"$1/components/hard-reset/rbac.yaml"
    plain declare --set declare.enabled=true >"$1/components/declare/rbac.yaml"
    plain admission --set admission.enabled=true >"$1/components/admission/policies.yaml"
}

check_generated() {
    local dir=$WORK/kustomize name
    cp -r "$KUSTOMIZE" "$dir"
    generate "$dir"
    diff -r "$KUSTOMIZE" "$dir" || die "deploy/kustomize is not what the chart makes: hack/chart.sh generate"
    for name in base cleanup overlays/{hard-reset,declare,admission}; do
        kubectl kustomize "$KUSTOMIZE/$name" >"$WORK/$(basename "$name").kustomize"
    done
    # The components are the chart's values of the same names.
    compare_daemonsets hard-reset --set hardReset.enabled=true
    compare_daemonsets declare --set declare.enabled=true
}

# A component's patch makes the DaemonSet that the chart makes, but for the order of its lists.
compare_daemonsets() { # OVERLAY ARGS...
    local pods='.spec.template.spec | (.containers[0].args, .containers[0].volumeMounts, .volumes) |= (. // [] | sort_by(tostring))
        | del(.volumes[] | select(.name == "config"))'
    diff <(kubectl kustomize "$KUSTOMIZE/overlays/$1" | daemonset | jq -S "$pods") \
        <(render "${@:2}" --show-only templates/daemonset.yaml | daemonset | jq -S "$pods") ||
        die "the DaemonSet of overlays/$1 is not that of the chart"
}

# The one of them, as JSON, for which kubectl needs no API server if it has something to do.
daemonset() {
    kubectl label --local --output json -f - a=b | jq 'select(.kind == "DaemonSet")'
}

check_versions() {
    local cargo name
    cargo=$(version)
    for name in version appVersion; do
        grep -qE "^$name: \"?${cargo//./\\.}\"?$" "$CHART/Chart.yaml" || die "the chart's $name is not $cargo, as in Cargo.toml"
    done
}

check_values() {
    local values
    for values in "$CHART"/values.yaml "$CHART"/ci/*.yaml; do
        helm lint --strict --quiet "$CHART" --values "$values"
        render --values "$values" >"$WORK/$(basename "$values").rendered"
    done
    # Each is refused, for the reason that it is there for.
    local bad
    for bad in imag.name=x image.pullPolicy=Sometimes image.tag=a/b image.name= nri.plugin.index=100 nri.plugin.index=ten \
        nri.runtime.patchConfig=true nri.socket=nri.sock cri.socket=unix:///run/containerd/containerd.sock \
        cri.socket=/run/crio/crio.sock crio.enabled=true \
        kubelet.podsDir=pods directories.run= directories.stat=/x config.log-level=loud \
        config.nri-socket=/x config.back-off=-1 config.back-off-floor=none config.hardReset.method=Evict hardReset.enabled=maybe \
        hardReset.terms.cooldown=3 hardReset.terms.method=Drop hardReset.terms.maxResetsPerHour=1001 \
        'admission.actions={}' 'admission.actions={Forbid}' 'admission.actions={Deny,Warn}' 'admission.namespaces={Upper}' namespace=-x \
        resources.requests.cpu=1 resources.memory=lots 'tolerations[0].effect=Never' mountPropagation=Bidirectional \
        podPriorityClassNodeCritical=often cleanup.timeoutSeconds=0 securityContext.privileged=true \
        affinity.nodes=x nodeSelector.x=1 metrics.address=localhost metrics.port=0 metrics.port=80 metrics.alerts=true \
        hardReset.terms.windowSeconds=72001; do
        if render --set "$bad" >/dev/null 2>"$WORK/error"; then
            die "the chart takes $bad"
        fi
        grep -q "don't meet the specifications of the schema" "$WORK/error" ||
            die "the chart refuses $bad, but not by its schema: $(cat "$WORK/error")"
    done
}

# Nothing in the chart asks for all that there is, and only for CRI-O for some of that.
check_rights() {
    local file
    for file in "$WORK"/*.rendered; do
        ! grep -nE 'privileged: true|hostNetwork: true|hostIPC: true|verbs:.*\*' "$file" ||
            die "the chart asks for more than it needs: $file"
        [[ $file == */crio-values.yaml.rendered ]] || ! grep -nE 'hostPID: true|SYS_ADMIN|add: .*KILL' "$file" ||
            die "the chart asks for what only CRI-O needs: $file"
    done
}

# All of the chart is what this API server takes, to the last field.
check_on_server() {
    local file
    for file in "$WORK"/*.rendered "$WORK"/*.kustomize; do
        # No Prometheus operator has brought its kinds there.
        [[ $file != */monitoring-values.yaml.rendered ]] || continue
        kubectl apply --dry-run=server --validate=strict -f "$file" >"$WORK/applied" ||
            die "the API server refuses $(basename "$file")"
        echo "$(basename "$file"): $(wc -l <"$WORK/applied") objects"
    done
}

# shellcheck disable=SC2317 # called by a trap
remove_admission() {
    kubectl delete --ignore-not-found --wait=false -f "$WORK/policies.yaml" >/dev/null 2>&1 || true
    # Of which the API server learns a moment later as well: whoever plays scenarios next has pods that they would refuse.
    for ((i = 0; i < 60; i++)); do
        if [[ ! -s $WORK/cases.json ]] || is_accepted elsewhere "$WORK/cases.json"; then
            break
        fi
        sleep 0.5
    done
    kubectl delete --ignore-not-found --wait=false node "${NODES[@]}" >/dev/null 2>&1 || true
    local name
    for name in "${NAMESPACES[@]/#/reprise-check-}"; do
        kubectl --namespace "$name" delete --wait=false --grace-period=0 --force pods --all >/dev/null 2>&1 || true
        kubectl delete --ignore-not-found --wait=false namespace "$name" >/dev/null 2>&1 || true
    done
}

# The pods of pods.jq, each in a dry run, which asks the policies as well.
check_admission() {
    local name cases=$WORK/cases.json
    render --show-only templates/admission.yaml --set admission.enabled=true \
        --set 'admission.namespaces={reprise-check-named}' >"$WORK/policies.yaml"
    trap 'remove_admission; rm -rf "$WORK"' EXIT
    for name in "${NAMESPACES[@]}"; do
        kubectl create namespace "reprise-check-$name" >/dev/null
    done
    kubectl label namespace reprise-check-labelled reprise.dev/annotations=allowed >/dev/null
    jq -n -f "$HERE/chart/pods.jq" >"$cases"
    # One that is there already, with an annotation that will be refused.
    jq '.[] | select(.pod.metadata.name == "field").pod | .metadata.name = "old"' "$cases" | kubectl create -f - >/dev/null
    kubectl apply -f "$WORK/policies.yaml" >/dev/null
    await_policies "$cases"

    jq '{apiVersion: "v1", kind: "List", items: map(.pod)}' "$cases" |
        kubectl create --dry-run=server -f - >"$WORK/accepted" 2>"$WORK/refused" || true
    local failed=0 pod refused
    while IFS=$'\t' read -r pod refused; do
        if [[ -z $refused ]]; then
            grep -q "^pod/$pod created" "$WORK/accepted" && continue
            echo "not accepted: $pod: $(refusal "$pod")"
        else
            [[ $(refusal "$pod") == *"$refused"* ]] && continue
            echo "$pod: not refused with '$refused', but: $(refusal "$pod")"
        fi
        failed=1
    done < <(jq -r '.[] | [.pod.metadata.name, .refused // ""] | @tsv' "$cases")
    ((!failed)) || die "the admission policies do not what they are for"
    check_agreement "$cases"

    # What was there before stays changeable, but not for the worse.
    kubectl -n reprise-check-labelled label pod old touched=yes >/dev/null || die "a pod cannot be changed that was there before"
    local subresource
    for subresource in '' --subresource=status; do
        # shellcheck disable=SC2086 # none, or one
        kubectl -n reprise-check-labelled patch pod old $subresource --type merge \
            --patch '{"metadata": {"annotations": {"restart-rules.reprise.dev": "[{"}}}' 2>"$WORK/error" >/dev/null &&
            die "an update to a bad annotation is accepted ($subresource)"
        grep -q 'restart-rules.reprise.dev: malformed' "$WORK/error" || die "$(cat "$WORK/error")"
    done
    check_mirror "$cases"
    check_own_node
    echo "admission: $(jq '[.[] | select(.refused == null)] | length' "$cases") pods accepted," \
        "$(jq '[.[] | select(.refused)] | length' "$cases") refused, each for its reason"
}

# What the policies for annotations accept and refuse, `reprise check` does, which reads them as the plugin: but for what
# they leave to it.
check_agreement() { # CASES
    local disagree
    jq '{apiVersion: "v1", kind: "List", items: map(.pod)}' "$1" >"$WORK/pods.json"
    (cd "$HERE/.." && cargo run --locked --quiet -- check --output json "$WORK/pods.json") >"$WORK/checked.json" || true
    disagree=$(jq -r --slurpfile checked "$WORK/checked.json" '
        ($checked[0] | map({(.name): any(.problems[]; .severity == "error")}) | add) as $wrong
        | .[] | select(.pod.metadata.namespace == "reprise-check-labelled" and .pod.metadata.name != "lines-with-comments")
        | select((.refused != null) != $wrong[.pod.metadata.name]).pod.metadata.name' "$1")
    [[ -z $disagree ]] || die "reprise check and the admission policies disagree: $disagree"
}

# The kubelet's word for a static pod is accepted, whatever is in it and wherever it is.
check_mirror() { # CASES
    local node=${NODES[0]} uid
    uid=$(kubectl create -o jsonpath='{.metadata.uid}' -f - <<<'{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "'"$node"'"}}')
    jq --arg node "$node" --arg uid "$uid" '.[] | select(.pod.metadata.name == "elsewhere").pod
        | .spec.nodeName = $node | .metadata.annotations["kubernetes.io/config.mirror"] = "x"
        | .metadata.ownerReferences = [{apiVersion: "v1", kind: "Node", name: $node, uid: $uid, controller: true}]' "$1" |
        kubectl create --dry-run=server --as "system:node:$node" --as-group system:nodes -f - >/dev/null ||
        die "the kubelet cannot make the mirror of a static pod"
}

# With its rights and a token of its pod on one node, the plugin changes the status of what is there and of nothing else.
check_own_node() {
    local node pod expected said
    kubectl apply -f "$KUSTOMIZE/base/rbac.yaml" -f "$KUSTOMIZE/components/declare/rbac.yaml" >/dev/null
    for node in "${NODES[@]}"; do
        [[ $node == "${NODES[0]}" ]] ||
            kubectl create -f - <<<'{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "'"$node"'"}}' >/dev/null
        jq -n --arg node "$node" '{apiVersion: "v1", kind: "Pod", metadata: {name: $node, namespace: "reprise-check-other"},
            spec: {nodeName: $node, containers: [{name: "a", image: "none"}]}}' | kubectl create -f - >/dev/null
        [[ $node == "${NODES[0]}" ]] && expected="^$node " || expected='its own node and of pods there'
        for pod in "nodes/$node" "namespaces/reprise-check-other/pods/$node"; do
            said=$(patch_as_plugin "$pod" "${NODES[0]}")
            [[ "$said " =~ $expected ]] || die "the status of $pod: $said"
        done
    done
    said=$(patch_as_plugin "nodes/${NODES[0]}" '')
    [[ $said == *'its token is of no node' ]] || die "with a token of no pod: $said"
    kubectl delete -f "$KUSTOMIZE/components/declare/rbac.yaml" >/dev/null
    echo "admission: the plugin changes statuses on its own node alone"
}

# kubectl would read first, which the plugin may not.
patch_as_plugin() { # OBJECT NODE
    local config server token headers
    config=$(kubectl config view --raw --minify --output json)
    server=$(jq -r '.clusters[0].cluster.server' <<<"$config")
    token=$(jq -r '.users[0].user.token' <<<"$config")
    headers=(-H "Authorization: Bearer $token" -H 'Impersonate-User: system:serviceaccount:kube-system:reprise')
    [[ -z $2 ]] || headers+=(-H "Impersonate-Extra-authentication.kubernetes.io%2Fnode-name: $2")
    curl -sS --noproxy '*' --cacert <(jq -r '.clusters[0].cluster["certificate-authority-data"]' <<<"$config" | base64 -d) \
        "${headers[@]}" -H 'Content-Type: application/merge-patch+json' -X PATCH \
        -d '{"metadata": {"labels": {"touched": "yes"}}}' "$server/api/v1/$1/status" | jq -r '.message // .metadata.name'
}

refusal() { # POD
    grep -E "pods? \"$1\" is " "$WORK/refused" || echo 'accepted'
}

is_accepted() { # POD CASES
    jq --arg name "$1" '.[] | select(.pod.metadata.name == $name).pod' "$2" |
        kubectl create --dry-run=server -f - >/dev/null 2>&1
}

# The API server learns of a policy a moment after it is made.
await_policies() { # CASES
    local name
    for name in elsewhere empty; do
        for ((i = 0; i < 60; i++)); do
            is_accepted "$name" "$1" || continue 2
            sleep 0.5
        done
        die "the policies have no effect"
    done
}

check() { # [--if-built]
    if [[ ${1:-} == --if-built && ! -e $(helm_bin) ]]; then
        echo "the chart is not checked: helm is not built (hack/chart.sh build)"
        return
    fi
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    build
    check_versions
    check_values
    check_rights
    check_generated
    if [[ -n ${REPRISE_NODE_ENV:-} ]]; then
        set -a
        # shellcheck source=/dev/null
        source "$REPRISE_NODE_ENV"
        set +a
        check_on_server
        check_admission
    fi
    echo "the chart is in order"
}

main() {
    case ${1:-help} in
    build) build ;;
    generate)
        build
        generate "$KUSTOMIZE"
        ;;
    check) check "${@:2}" ;;
    *) usage && [[ ${1:-help} == help ]] ;;
    esac
}

main "$@"; exit
