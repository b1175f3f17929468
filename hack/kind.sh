#!/usr/bin/env bash
# The chart in a kind cluster, for whoever has docker, kind, kubectl and helm. It is not run here, where none of them is: what
# `make test` runs on are the nodes of node.sh.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"
cd "$HERE/.."

readonly NAME=${KIND_CLUSTER_NAME:-reprise}
# containerd 2, which has NRI on by default, is in the nodes' images from kind 0.27 on.
readonly NODE_IMAGE=${KIND_NODE_IMAGE:-}

usage() {
    cat <<END
usage: kind.sh up [ARCHIVE] [HELM-ARG...]   make a cluster if there is none, load the image (default: hack/image.sh makes it),
                                            and install the chart with that image
       kind.sh demo                         a pod that restarts in place
       kind.sh down                         uninstall the chart, which leaves the node as it was, and delete the cluster
KIND_CLUSTER_NAME (reprise) and KIND_NODE_IMAGE (kind's own default) say which cluster.
END
}

need() { # PROGRAM...
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || die "$program is missing"
    done
}

kubectl_() { kubectl --context "kind-$NAME" "$@"; }

up() { # [ARCHIVE [HELM-ARG...]]
    local archive=${1-}
    shift || true
    if [[ -z $archive ]]; then
        archive=$(own_image)
    fi
    [[ -f $archive ]] || die "no such file: $archive"
    kind get clusters 2>/dev/null | grep -qx "$NAME" ||
        kind create cluster --name "$NAME" ${NODE_IMAGE:+--image "$NODE_IMAGE"} --wait 120s
    # NRI's socket is what the plugin waits for: without it nothing would be said for long.
    docker exec "$NAME-control-plane" test -S /var/run/nri/nri.sock ||
        die "containerd in the node has no NRI socket: take a newer node image"
    kind load image-archive --name "$NAME" "$archive"
    helm upgrade --install reprise deploy/chart --kube-context "kind-$NAME" --namespace kube-system --wait --timeout 2m \
        --set "image.name=localhost/reprise,image.tag=$(version),image.pullPolicy=Never" "$@"
    kubectl_ --namespace kube-system rollout status daemonset/reprise --timeout=2m
}

demo() {
    kubectl_ delete pod demo --ignore-not-found
    # The image of the nodes of node.sh is nowhere else, and a pod of kind's has no node by name.
    sed -e '/nodeName:/d' -e 's#localhost/reprise/busybox:1#busybox:1.36#' -e '/imagePullPolicy:/d' hack/demo/pod.yaml |
        kubectl_ apply -f -
    # It has no reason of its own to start again.
    kubectl_ wait --timeout=3m pod/demo \
        --for=jsonpath='{.status.containerStatuses[?(@.name=="server")].restartCount}'=1
    kubectl_ get pod demo
    kubectl_ describe pod demo | sed -n '/^Events:/,$p'
}

down() {
    helm uninstall reprise --kube-context "kind-$NAME" --namespace kube-system --wait --timeout 5m || true
    kind delete cluster --name "$NAME"
}

main() {
    local command=${1:-help}
    shift || true
    case $command in
    up)
        need docker kind kubectl helm
        up "$@"
        ;;
    demo)
        need kubectl
        demo
        ;;
    down)
        need kind helm
        down
        ;;
    *) usage && [[ $command == help ]] ;;
    esac
}

main "$@"; exit
