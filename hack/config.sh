# Writes what the node's components read: certificates, kubeconfigs, configuration. Sourced.
# shellcheck shell=bash

# Everything below works on the node that use_node (node.sh) has chosen: NODE, DIR, SLOT, K8S, KUBELET,
# RUNTIME, CONTAINERD, CRIO_RELEASE, GATES, ACCOUNTS, NRI, NRI_PLUGINS.

# Below the range of ephemeral ports, so that no outgoing connection is ever in the way.
port() { # etcd | etcd-peer | apiserver | kubelet | kubelet-health | controller-manager | registry
    local base=$((21000 + SLOT * 10))
    case $1 in
    etcd) echo $base ;;
    etcd-peer) echo $((base + 1)) ;;
    apiserver) echo $((base + 2)) ;;
    kubelet) echo $((base + 3)) ;;
    kubelet-health) echo $((base + 4)) ;;
    controller-manager) echo $((base + 5)) ;;
    registry) echo $((base + 6)) ;;
    esac
}

# Of the service `kubernetes`, as pods are told. Nothing is there unless somebody does what kube-proxy does.
readonly SERVICE_IP=10.96.0.1

bridge() { echo "reprise$SLOT"; }
pod_subnet() { echo "10.213.$SLOT.0/24"; }

# The bridge's own address is the node's: a loopback address is none in the kubelet's eyes, and the
# API server reaches the kubelet at this one without leaving the machine.
node_ip() { echo "10.213.$SLOT.1"; }

# Where the node's pods are, and what the kubelet calls it.
cgroup() { if has_systemd_cgroups; then echo "/$(slice)"; else cgroup_root; fi; }
cgroup_root() { echo "/reprise-$NODE"; }
has_systemd_cgroups() { has_systemd && has_cgroup_v2; }

token() { openssl rand -hex 16; }

write_configs() {
    install -d -m 700 "$DIR/pki"
    mkdir -p "$DIR"/{log,run,bin,cdi,cni,manifests,nri/plugins,nri/conf.d,pod-logs,registries,volume-plugins}
    # Root in a pod's own user namespace looks for its files in there.
    install -d -m 711 "$DIR/$RUNTIME"
    if [[ -n $API_DIR ]]; then
        join_credentials
    else
        write_certificates
        write_credentials
    fi
    write_cni_config
    write_kubelet_config
    write_runtime_config
    write_commands
}

write_runtime_config() {
    case $RUNTIME/$CONTAINERD in
    crio/*) write_crio_config ;;
    containerd/1.*) link_other_shim && write_containerd_1_config ;;
    *) link_other_shim && write_containerd_2_config ;;
    esac
}

# A CA and a server certificate that strict clients take: the leaf is no CA and names its address.
write_certificates() {
    local pki=$DIR/pki
    openssl genrsa -out "$pki/service-account.key" 2048 2>/dev/null
    cat >"$pki/openssl.cnf" <<END
[req]
distinguished_name = name
prompt = no
[name]
CN = reprise-$NODE
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, IP:$SERVICE_IP, DNS:localhost
END
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 \
        -config "$pki/openssl.cnf" -extensions ca -keyout "$pki/ca.key" -out "$pki/ca.crt" 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kube-apiserver \
        -config "$pki/openssl.cnf" -keyout "$pki/apiserver.key" 2>/dev/null |
        openssl x509 -req -days 365 -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial \
            -extfile "$pki/openssl.cnf" -extensions server -out "$pki/apiserver.crt" 2>/dev/null
}

write_credentials() {
    local admin kubelet manager
    admin=$(token) kubelet=$(token) manager=$(token)
    (umask 077 && cat >"$DIR/pki/tokens.csv") <<END
$admin,admin,admin,"system:masters"
$manager,controller-manager,controller-manager,"system:masters"
$kubelet,system:node:$NODE,system:node:$NODE,"system:nodes"
END
    write_kubeconfig admin "$admin"
    write_kubeconfig controller-manager "$manager"
    write_kubeconfig kubelet "$kubelet"
}

# Those of the node whose control plane this is; it has the address of this node's own.
join_credentials() {
    local file
    cp -r "$API_DIR/pki" "$DIR/"
    for file in "$API_DIR"/*.kubeconfig; do
        (umask 077 && sed "s|^\( *server:\) .*|\1 https://127.0.0.1:$(port apiserver)|" "$file" >"$DIR/${file##*/}")
    done
}

# The plugin's rights are those that users give it. No controller is needed for the token of a service account; it lasts as
# long as the certificates.
write_plugin_credentials() {
    kubectl apply -f "$HERE/../deploy/kustomize/base/rbac.yaml" >>"$DIR/log/apiserver.log"
    write_kubeconfig plugin "$(kubectl create token reprise --namespace kube-system --duration 8760h)"
}

write_kubeconfig() { # USER TOKEN
    (umask 077 && cat >"$DIR/$1.kubeconfig") <<END
apiVersion: v1
kind: Config
current-context: $NODE
contexts:
- name: $NODE
  context: {cluster: $NODE, user: $1}
clusters:
- name: $NODE
  cluster:
    server: https://127.0.0.1:$(port apiserver)
    certificate-authority-data: $(base64 -w0 "$DIR/pki/ca.crt")
users:
- name: $1
  user: {token: $2}
END
}

# The bridge is made by machine.sh and no gateway for the plugin: as one it would switch on
# forwarding for the whole machine. No NAT either, hence no iptables rules.
write_cni_config() {
    mkdir -p "$DIR/cni/net.d"
    cat >"$DIR/cni/net.d/10-reprise.conflist" <<END
{
  "cniVersion": "1.0.0",
  "name": "reprise-$NODE",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "$(bridge)",
      "ipam": {
        "type": "host-local",
        "dataDir": "$DIR/cni/ipam",
        "ranges": [[{"subnet": "$(pod_subnet)", "gateway": "$(node_ip)"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    }
  ]
}
END
}

can_lower_oom_scores() { (echo -999 >/proc/self/oom_score_adj) 2>/dev/null; }

write_kubelet_config() {
    local driver=cgroupfs allocatable='[]' score=0
    ! has_systemd_cgroups || driver=systemd
    ! can_lower_oom_scores || allocatable='[pods]' score=-999
    # failCgroupV1: from 1.35 a machine with cgroup v1 is refused otherwise.
    # enforceNodeAllocatable, oomScoreAdj: need CAP_SYS_RESOURCE, which containers often lack.
    # clusterDNS: there is none; the node's address refuses at once, and no address at all would
    # earn every pod a warning event.
    # evictionHard, imageGC...: the machine's disk is shared, and its being full is not our business.
    cat >"$DIR/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $(node_ip)
port: $(port kubelet)
healthzBindAddress: 127.0.0.1
healthzPort: $(port kubelet-health)
readOnlyPort: 0
authentication:
  anonymous: {enabled: true}
  webhook: {enabled: false}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://$(runtime_socket)
cgroupDriver: $driver
cgroupRoot: $(cgroup_root)
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: $allocatable
oomScoreAdj: $score
resolvConf: ""
clusterDNS: ["$(node_ip)"]
maxPods: 200
podLogsDir: $DIR/pod-logs
staticPodPath: $DIR/manifests
volumePluginDir: $DIR/volume-plugins
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
volumeStatsAggPeriod: 5s
evictionHard:
  memory.available: "0%"
  nodefs.available: "0%"
  nodefs.inodesFree: "0%"
  imagefs.available: "0%"
  imagefs.inodesFree: "0%"
END
}

# A runtime whose type says that it is not runc, as those of kata and gVisor do, and which is runc
# nevertheless. containerd derives the shim's name from the type and looks for it on its PATH.
# A type that it does not know cannot have runc's options, so this one's state is where runc has it by
# default; see remove_shared_files.
link_other_shim() {
    ln -s "$(containerd_bin "$CONTAINERD")/containerd-shim-runc-v2" "$DIR/bin/containerd-shim-nohooks-v1"
}

write_containerd_head() { # CONFIG_VERSION
    cat <<END
version = $1
root = "$DIR/containerd/root"
state = "$DIR/containerd/state"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.native",
]

[grpc]
address = "$DIR/containerd.sock"

[plugins."io.containerd.nri.v1.nri"]
disable = $([[ $NRI == on ]] && echo false || echo true)
socket_path = "$DIR/nri/nri.sock"
plugin_path = "$NRI_PLUGINS"
plugin_config_path = "$DIR/nri/conf.d"
END
}

# The runtime section of the CRI plugin, which moved between the versions but kept its keys.
# restrict_oom_score_adj: lowering a score needs CAP_SYS_RESOURCE.
# Root, netns_mounts_under_state_dir: by default in /run, shared with every other containerd.
write_containerd_runtime() { # PLUGIN CNI_BIN_KEY
    cat <<END

[plugins."$1"]
restrict_oom_score_adj = $(can_lower_oom_scores && echo false || echo true)
netns_mounts_under_state_dir = true
enable_cdi = true
cdi_spec_dirs = ["$DIR/cdi"]

[plugins."$1".containerd]
default_runtime_name = "runc"

[plugins."$1".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."$1".containerd.runtimes.runc.options]
SystemdCgroup = $(has_systemd_cgroups && echo true || echo false)
Root = "$DIR/runc"

[plugins."$1".containerd.runtimes.nohooks]
runtime_type = "io.containerd.nohooks.v1"

[plugins."$1".cni]
$2
conf_dir = "$DIR/cni/net.d"
END
}

# Empty, unless somebody has a registry to pull from. It is read at every pull.
write_containerd_registries() { # PLUGIN
    printf '\n[plugins."%s".registry]\nconfig_path = "%s"\n' "$1" "$DIR/registries"
}

write_containerd_1_config() {
    {
        write_containerd_head 2
        write_containerd_runtime io.containerd.grpc.v1.cri 'bin_dir = "/usr/lib/cni"' |
            sed "/^restrict_oom_score_adj/i sandbox_image = \"$PAUSE_IMAGE\""
        write_containerd_registries io.containerd.grpc.v1.cri
    } >"$DIR/containerd.toml"
}

write_containerd_2_config() {
    {
        write_containerd_head 3
        printf '\n[plugins."io.containerd.cri.v1.images".pinned_images]\nsandbox = "%s"\n' "$PAUSE_IMAGE"
        write_containerd_runtime io.containerd.cri.v1.runtime 'bin_dirs = ["/usr/lib/cni"]'
        write_containerd_registries io.containerd.cri.v1.images
    } >"$DIR/containerd.toml"
}

# One script per component: what starts it the first time starts it again after a fault. The
# environment is clean because a proxy of the caller's would get the API server's calls to the
# kubelet.
write_command() { # COMPONENT PROGRAM ARGS...
    local file=$DIR/run/$1.sh
    shift
    {
        echo '#!/bin/sh'
        printf 'exec env -i HOME=/root PATH=%q' \
            "$DIR/bin:$(containerd_bin "$CONTAINERD"):$(runc_bin "$CONTAINERD"):/usr/sbin:/usr/bin:/sbin:/bin"
        printf ' %q' "$@"
        echo
    } >"$file"
    chmod 755 "$file"
}

write_commands() {
    local etcd peer gates=() kubelet sync=(--unsafe-no-fsync) accounts=(--disable-admission-plugins=ServiceAccount)
    local controllers=job,deployment,replicaset,statefulset,daemonset,endpointslice,garbagecollector,disruption
    etcd=http://127.0.0.1:$(port etcd) peer=http://127.0.0.1:$(port etcd-peer)
    [[ -z $GATES ]] || gates=(--feature-gates="$GATES")
    # What is started again with the machine must outlive its crash.
    ! has_systemd || sync=()

    write_command etcd etcd --data-dir="$DIR/etcd" "${sync[@]}" \
        --listen-client-urls="$etcd" --advertise-client-urls="$etcd" \
        --listen-peer-urls="$peer" --initial-advertise-peer-urls="$peer" \
        --initial-cluster=default="$peer"

    # Without the controllers that make the service accounts of namespaces, admission must not ask for them.
    if [[ -n $ACCOUNTS ]]; then
        accounts=() controllers+=,serviceaccount,root-ca-cert-publisher
    fi
    write_command apiserver "$(k8s_bin "$K8S")/kube-apiserver" --v=2 "${gates[@]}" \
        --etcd-servers="$etcd" --bind-address=127.0.0.1 --secure-port="$(port apiserver)" \
        --advertise-address="$(node_ip)" --endpoint-reconciler-type=none \
        --service-cluster-ip-range=10.96.0.0/16 --cert-dir="$DIR/pki" \
        --tls-cert-file="$DIR/pki/apiserver.crt" --tls-private-key-file="$DIR/pki/apiserver.key" \
        --token-auth-file="$DIR/pki/tokens.csv" --authorization-mode=Node,RBAC \
        --service-account-issuer=https://kubernetes.default.svc \
        --service-account-key-file="$DIR/pki/service-account.key" \
        --service-account-signing-key-file="$DIR/pki/service-account.key" \
        --enable-admission-plugins=NodeRestriction "${accounts[@]}" \
        --allow-privileged=true \
        --kubelet-preferred-address-types=InternalIP

    # The garbage collector deletes the pods of a Job or Deployment that is deleted, and disruption is what keeps account for
    # PodDisruptionBudgets.
    write_command controller-manager "$(k8s_bin "$K8S")/kube-controller-manager" --v=2 "${gates[@]}" \
        --kubeconfig="$DIR/controller-manager.kubeconfig" --leader-elect=false \
        --controllers=$controllers --root-ca-file="$DIR/pki/ca.crt" \
        --bind-address=127.0.0.1 --secure-port="$(port controller-manager)" \
        --tls-cert-file="$DIR/pki/apiserver.crt" --tls-private-key-file="$DIR/pki/apiserver.key"

    # Started by whoever wants it: pods here have their node.
    write_command scheduler "$(k8s_bin "$K8S")/kube-scheduler" --v=2 "${gates[@]}" \
        --kubeconfig="$DIR/controller-manager.kubeconfig" --leader-elect=false --secure-port=0

    # What is elsewhere is reached through what stands in its place, to be ended and started like it.
    if [[ -n $API ]]; then
        write_command apiserver systemd-socket-activate --listen="127.0.0.1:$(port apiserver)" \
            /lib/systemd/systemd-socket-proxyd "$API"
        write_command etcd sleep infinity
        write_command controller-manager sleep infinity
    fi

    case $RUNTIME in
    containerd) write_command containerd "$(containerd_bin "$CONTAINERD")/containerd" --config="$DIR/containerd.toml" ;;
    crio) write_command crio "$(crio_bin "$CRIO_RELEASE")/crio" --config="$DIR/crio.conf" --config-dir="$DIR/crio/conf.d" ;;
    esac

    kubelet=("$(k8s_bin "$KUBELET")/kubelet" --v=2 "${gates[@]}" --config="$DIR/kubelet.yaml"
        --root-dir="$DIR/kubelet" --cert-dir="$DIR/kubelet-pki"
        --hostname-override="$NODE" --node-ip="$(node_ip)")
    write_command kubelet "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig"
    # The first core is everybody's, the others are for containers that ask for whole ones.
    write_command kubelet-exclusive-cpus "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig" \
        --cpu-manager-policy=static --reserved-cpus=0
    # It asks for a relist when the runtime tells of an end, or (before 1.37) believes the runtime's events for minutes.
    write_command kubelet-evented-pleg "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig" \
        --feature-gates=EventedPLEG=true
    # From 1.36 on it restarts all containers by itself unless it is told not to; older ones do not know the gate.
    write_command kubelet-without-restart-all "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig" \
        --feature-gates=RestartAllContainersOnContainerExits=false
    # Somebody stands between it and the runtime.
    write_command kubelet-other-runtime "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig" \
        --container-runtime-endpoint="unix://$DIR/other-runtime.sock"
    # A container that crashes is started again within a second or two, however often.
    {
        cat "$DIR/kubelet.yaml"
        printf 'featureGates: {KubeletCrashLoopBackOffMax: true}\ncrashLoopBackOff: {maxContainerRestartPeriod: 1s}\n'
    } >"$DIR/kubelet-quick-back-off.yaml"
    write_command kubelet-quick-back-off "${kubelet[@]}" --kubeconfig="$DIR/kubelet.kubeconfig" \
        --config="$DIR/kubelet-quick-back-off.yaml"
    # It ends its pods before the machine shuts down, if whoever listens there says so in the place of systemd's logind.
    {
        cat "$DIR/kubelet.yaml"
        printf 'shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 2s\n'
    } >"$DIR/kubelet-shutdown.yaml"
    write_command kubelet-shutdown env DBUS_SYSTEM_BUS_ADDRESS="unix:path=$DIR/logind.sock" "${kubelet[@]}" \
        --kubeconfig="$DIR/kubelet.kubeconfig" --config="$DIR/kubelet-shutdown.yaml"
    # Without a kubeconfig it asks no API server and runs static pods only.
    write_command kubelet-standalone "${kubelet[@]}"
}

write_env() {
    cat >"$DIR/env" <<END
KUBECONFIG=$DIR/admin.kubeconfig
PLUGIN_KUBECONFIG=$DIR/plugin.kubeconfig
RUNTIME=$RUNTIME
CRI_ENDPOINT=unix://$(runtime_socket)
NRI_SOCKET=$DIR/nri/nri.sock
NODE_NAME=$NODE
NODE_DIR=$DIR
KUBELET_LOGS=$DIR/pod-logs
STATIC_POD_PATH=$DIR/manifests
KUBECTL=$(k8s_bin "$K8S")/kubectl
$([[ $RUNTIME != containerd ]] || echo "CTR=$(containerd_bin "$CONTAINERD")/ctr")
JOBSET=$(jobset_bin)
BUSYBOX_IMAGE=$BUSYBOX_IMAGE
OTHER_IMAGE=$OTHER_IMAGE
END
}
