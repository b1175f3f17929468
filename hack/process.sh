# Starts, watches and ends a node's components by recorded process ids. Sourced.
# shellcheck shell=bash

# When a process began, in clock ticks since boot: with its id it names one process for ever.
# Fails when there is none, or a dead one that nobody has reaped. It is not dead before its last
# thread is: until then its sockets listen, though its first thread is a zombie already.
born() { # PID
    local stat fields
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return
    read -ra fields <<<"${stat##*) }" # what precedes is the program's name, which may hold spaces
    [[ ${fields[0]} != Z || ${fields[17]} -gt 1 ]] && echo "${fields[19]}"
}

is_alive() { # COMPONENT
    local pid birth
    read -r pid birth 2>/dev/null <"$DIR/run/$1.pid" || return
    [[ $(born "$pid") == "$birth" ]]
}

start_component() { # COMPONENT
    local other
    for other in "$1" $(in_place_of "$1"); do
        is_alive "$other" && die "$other of node $NODE runs already"
    done
    if has_systemd; then
        systemctl start "$(unit "$1")" || die "$1 does not start; see $DIR/log/$1.log"
        return
    fi
    setsid "$DIR/run/$1.sh" </dev/null >>"$DIR/log/$1.log" 2>&1 &
    echo "$! $(born $!)" >"$DIR/run/$1.pid"
}

in_place_of() { # COMPONENT
    [[ $1 != kubelet* ]] || printf '%s\n' "${KUBELETS[@]}" | grep -vxF -- "$1"
}

# Only the component's own process gets the signal: the containers and their shims stay, as on any
# node.
end_component() { # SIGNAL COMPONENT
    local pid
    is_alive "$2" || return 0
    read -r pid _ <"$DIR/run/$2.pid"
    kill -s "$1" "$pid" 2>/dev/null || true
    # The API server lets its watches run out on SIGTERM.
    wait_for 90 "end of $2" is_dead "$2"
}

is_dead() { ! is_alive "$1"; }

# Polls until COMMAND succeeds; says what was missing when it does not. A slow machine has REPRISE_PATIENCE.
wait_for() { # SECONDS WHAT COMMAND...
    local limit=$(($1 * ${REPRISE_PATIENCE:-1})) what=$2 deadline
    shift 2
    deadline=$((SECONDS + limit))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || die "no $what within $limit s"
        sleep "0.${REPRISE_PATIENCE:-1}"
    done
}

# The same for a component's sign of life; gives up as soon as the component has.
await() { # COMPONENT WHAT COMMAND...
    local component=$1 what=$2
    shift 2
    wait_for 120 "$what" succeeds_or_dead "$component" "$@"
    is_alive "$component" || {
        tail -n 20 "$DIR/log/$component.log" >&2
        die "$component ended ($(tail -n 1 "$DIR/log/$component.log")); see $DIR/log/$component.log, then: node.sh down $NODE"
    }
}

succeeds_or_dead() { # COMPONENT COMMAND...
    is_dead "$1" || "${@:2}"
}

await_component() { # COMPONENT
    [[ -z $API || $1 != @(etcd|controller-manager) ]] || return 0
    case $1 in
    etcd) await etcd "etcd's port" tcp_open 127.0.0.1 "$(port etcd)" ;;
    apiserver) await apiserver "API server with a default namespace" api_ready ;;
    containerd) await "$1" "containerd" cri_ready containerd ;;
    crio) await "$1" "CRI-O" cri_ready cri-o ;;
    controller-manager) await "$1" "healthy controller manager" manager_ready ;;
    kubelet*) await "$1" "healthy kubelet" kubelet_healthy ;;
    esac
}

tcp_open() { (exec 3<>"/dev/tcp/$1/$2"); }

kubelet_healthy() { curl -fsS --max-time 5 "http://127.0.0.1:$(port kubelet-health)/healthz"; }

kubectl() { "$(k8s_bin "$K8S")/kubectl" --kubeconfig="$DIR/admin.kubeconfig" "$@"; }
ctr() { "$(containerd_bin "$CONTAINERD")/ctr" -a "$(runtime_socket)" "$@"; }

runtime_socket() { echo "$DIR/$RUNTIME.sock"; }

# kubectl takes seconds to start on a slow machine.
api() { # PATH
    curl -fsS --max-time 10 --cacert "$DIR/pki/ca.crt" \
        -H @<(sed -n '1s/^\([^,]*\),.*/Authorization: Bearer \1/p' "$DIR/pki/tokens.csv") \
        "https://127.0.0.1:$(port apiserver)$1"
}

api_ready() { api /readyz && api /api/v1/namespaces/default; }

manager_ready() {
    curl -fsS --max-time 5 --cacert "$DIR/pki/ca.crt" \
        "https://127.0.0.1:$(port controller-manager)/healthz"
}

# The CRI's Version call with an empty message. The socket is there, and ctr content, before the CRI
# plugin is; a kubelet that comes too early gives up ("server is not initialized yet").
cri_ready() { # NAME
    local answer
    answer=$(printf '\0\0\0\0\0' | curl -sS --max-time 5 --http2-prior-knowledge \
        --unix-socket "$(runtime_socket)" -H 'content-type: application/grpc' -H 'te: trailers' \
        --data-binary @- http://cri/runtime.v1.RuntimeService/Version | tr -d '\0')
    [[ $answer == *"$1"* ]]
}

node_ready() { api "/api/v1/nodes/$NODE" | jq -e '.status.conditions[] | select(.type == "Ready") | .status == "True"'; }
