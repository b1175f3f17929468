#!/usr/bin/env bash
# Runs critest, by which a container runtime is judged, against containerd without the plugin and with it, and fails if any test
# ends otherwise. Takes its node down whatever happens.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build images config; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done
readonly NODE=crit$$

# What cannot be had here: a part of the tests' names, and why.
readonly LEFT_OUT=(
    'public image with digest|asks for an image by the digest of one that is elsewhere'
    "support MaskedPaths|masks a program that the shell of Debian's busybox has built in"
    'port mapping with host port|wants the CNI plugin portmap, which changes the packet filter of the machine'
)

usage() {
    cat <<END
usage: hack/critest.sh [OPTION]...
  --containerd V   ${CONTAINERD_VERSIONS[*]} (default $DEFAULT_CONTAINERD)
  --focus REGEX    only the tests whose names it matches
  --seed N         the order of the tests (default: drawn)
  --results DIR    reports and logs (default target/critest)
REPRISE_BIN        the plugin (default target/debug/reprise, built if it is not there)
The pods of critest have no annotations, so the plugin must not make any difference. A test that ends in one way without
the plugin and in another way with it is run twice more in both ways, and is a difference if these runs differ too.
Exit code 1 if there are differences, or if the plugin did not last.
END
}

parse_options() {
    CONTAINERD=$DEFAULT_CONTAINERD FOCUS='' RESULTS=$HERE/../target/critest
    SEED=$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')
    while (($#)); do
        case $1 in
        -h | --help) usage && exit ;;
        --containerd | --focus | --seed | --results) ;;
        *) usage >&2 && exit 2 ;;
        esac
        (($# > 1)) || die "$1 needs a value"
        case $1 in
        --containerd) CONTAINERD=$2 ;;
        --focus) FOCUS=$2 ;;
        --seed) SEED=$2 ;;
        --results) RESULTS=$2 ;;
        esac
        shift 2
    done
    one_of "containerd version" "$CONTAINERD" "${CONTAINERD_VERSIONS[@]}"
    mkdir -p "$RESULTS"
    RESULTS=$(realpath "$RESULTS")
}

# --- the node ---------------------------------------------------------------------------------------

# Nothing but containerd: a kubelet would remove what it does not know.
bring_up() {
    local component
    "$HERE/node.sh" up "$NODE" --containerd "$CONTAINERD" | grep '^#'
    for component in kubelet controller-manager apiserver etcd; do
        "$HERE/node.sh" kill "$NODE" "$component"
    done
    # The names of the node's images are in images.sh, for ever.
    # shellcheck source=/dev/null
    source <("$HERE/node.sh" env "$NODE" | grep -v '_IMAGE=')
    SLOT=$(<"$NODE_DIR/slot")
}

# What all images consist of: busybox, and what the tests expect of others.
make_root() { # ROOT
    local root=$1
    busybox_root "$root"
    mkdir -p "$root"/{var/run,www}
    printf '%s\n' 'www-data:x:33:33::/var:/bin/sh' 'default-user:x:1000:1000::/root:/bin/sh' \
        'nobody:x:65534:65534::/:/bin/sh' >>"$root/etc/passwd"
    printf '%s\n' 'www-data:x:33:' 'users:x:100:' 'default-user:x:1000:' 'nogroup:x:65534:' \
        'group-defined-in-image:x:50000:default-user' >>"$root/etc/group"
    echo welcome >"$root/www/index.html"
    # A process with the name, the arguments and the file of nginx's, and with a word of httpd's log.
    cat >"$root/sbin/nginx" <<'END'
#!/bin/sh
echo $$ >/var/run/nginx.pid
echo "httpd listens on port $PORT"
httpd -f -p "$PORT" -h /www &
wait
END
    # Debian's busybox has neither.
    printf '#!/bin/sh\nexec pidof "$@"\n' >"$root/usr/bin/pgrep"
    printf '#!/bin/sh\nexec cat /proc/sysvipc/shm\n' >"$root/usr/bin/ipcs"
    cc -Os -static -o "$root/sbin/effective-uid" "$HERE/critest/effective-uid.c"
    chmod 755 "$root/sbin/nginx" "$root/usr/bin/"{pgrep,ipcs}
    chmod 4755 "$root/sbin/effective-uid"
}

# containerd pulls every image from here, so that no name of one has to be known.
start_registry() {
    local layer url deadline=$((SECONDS + 60))
    say "a registry that has every image"
    make_root "$WORK/root"
    mkdir -p "$WORK"/registry/cgi-bin "$WORK/blobs" "$NODE_DIR/registries/_default"
    tar -C "$WORK/root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$WORK/layer.tar" .
    layer=$(sha256sum "$WORK/layer.tar" | cut -d ' ' -f 1)
    mv "$WORK/layer.tar" "$WORK/blobs/$layer"
    install -m 755 "$HERE/critest/registry.sh" "$WORK/registry/cgi-bin/v2"
    env -i PATH="$PATH" BLOBS="$WORK/blobs" LAYER="$layer" ARCH="$(go env GOARCH)" \
        busybox httpd -f -p "127.0.0.1:$(port registry)" -h "$WORK/registry" &
    ENDING+=($!)
    url=http://127.0.0.1:$(port registry)/cgi-bin/v2
    printf 'server = "%s"\noverride_path = true\n' "$url" >"$NODE_DIR/registries/_default/hosts.toml"
    until curl -fsSI -o /dev/null --max-time 5 "$url/any/manifests/latest" 2>"$WORK/curl"; do
        is_running $! || die "the registry has ended"
        ((SECONDS < deadline)) || die "the registry does not answer: $(<"$WORK/curl")"
        sleep 0.2
    done
}

is_running() { kill -0 "$1" 2>/dev/null; }

# --- the plugin -------------------------------------------------------------------------------------

build_plugin() {
    PLUGIN_BIN=${REPRISE_BIN:-$HERE/../target/debug/reprise}
    if [[ -z ${REPRISE_BIN:-} ]]; then
        say "building the plugin"
        (cd "$HERE/.." && cargo build --locked --target-dir target)
    fi
    PLUGIN_BIN=$(realpath "$PLUGIN_BIN")
}

start_plugin() {
    local deadline=$((SECONDS + 60))
    # Without an API server: no pod asks for anything that would be looked up there.
    "$PLUGIN_BIN" run --nri-socket "$NRI_SOCKET" --cri-endpoint "$CRI_ENDPOINT" --static-pod-path "$STATIC_POD_PATH" \
        --node-name "$NODE" --run-dir "$WORK/run" --state-dir "$WORK/state" --hook-path "$PLUGIN_BIN" \
        --log-level debug >"$RESULTS/plugin.log" 2>&1 &
    PLUGIN=$!
    ENDING+=("$PLUGIN")
    until grep -q "connected to NRI" "$RESULTS/plugin.log"; do
        if ! is_running "$PLUGIN" || ((SECONDS >= deadline)); then
            tail -n 20 "$RESULTS/plugin.log" >&2
            die "the plugin is not connected to containerd, see $RESULTS/plugin.log"
        fi
        sleep 0.2
    done
    say "the plugin is connected"
}

# A plugin that containerd has dropped would make no difference either.
plugin_is_well() {
    local times
    times=$(grep -c "connected to NRI" "$RESULTS/plugin.log" || true)
    if ! is_running "$PLUGIN" || grep -q "panicked at" "$RESULTS/plugin.log"; then
        tail -n 20 "$RESULTS/plugin.log" >&2
        echo "the plugin has ended, see $RESULTS/plugin.log"
    elif ((times != 1)); then
        echo "the plugin has been connected $times times, see $RESULTS/plugin.log"
    else
        return 0
    fi
    return 1
}

stop_plugin() {
    kill "$PLUGIN" 2>/dev/null || true
    wait "$PLUGIN" 2>/dev/null || true
}

# --- critest ----------------------------------------------------------------------------------------

# Leaves NAME.json in the results: an array of the tests with their states and reasons.
run_critest() { # NAME ARG...
    local name=$1 raw=$WORK/$1.json log=$RESULTS/$1.log args=() pair began=$SECONDS told=$SECONDS total
    for pair in "${LEFT_OUT[@]}"; do
        args+=(--ginkgo.skip="${pair%%|*}")
    done
    say "critest, $name: log in $log"
    TMPDIR=$WORK/tmp "$(critest_bin)/critest.test" --runtime-endpoint="$CRI_ENDPOINT" --nri-socket="$NRI_SOCKET" \
        --ginkgo.seed="$SEED" --ginkgo.v --ginkgo.no-color --ginkgo.timeout=90m --ginkgo.json-report="$raw" "${args[@]}" "${@:2}" \
        </dev/null >"$log" 2>&1 &
    CRITEST=$!
    ENDING+=("$CRITEST")
    while is_running "$CRITEST"; do
        sleep 1
        ((SECONDS - told >= 20)) || continue
        told=$SECONDS
        total=$(sed -n 's/^Will run \([0-9]*\) of .*/\1/p' "$log")
        say "critest, $name: $(grep -c '^\(•\|S\) \[' "$log") of ${total:-?} tests, $((SECONDS - began)) s"
    done
    # Its exit code says that a test has failed, as the report does.
    wait "$CRITEST" || true
    [[ -s $raw ]] || {
        tail -n 20 "$log" >&2
        die "critest has ended without a report, see $log"
    }
    jq -e '.[0].SpecReports | all(.LeafNodeType == "It" or .State == "passed")' "$raw" >/dev/null || {
        tail -n 20 "$log" >&2
        die "critest did not come to its tests, see $log"
    }
    jq '[.[0].SpecReports[] | select(.LeafNodeType == "It") | {
            name: (.ContainerHierarchyTexts + [.LeafNodeText] | join(" ")),
            state: (if .State == "passed" then "passed" elif .State == "skipped" or .State == "pending" then "skipped" else "failed" end),
            why: ((.Failure.Message // "" | split("\n")[0] // "") | gsub(" ?\\(?\\[[0-9a-f ]{64,}\\]\\)?"; "")), seconds: (.RunTime / 1e9)}] | sort_by(.name)' "$raw" >"$RESULTS/$name.json"
    say "critest, $name: $(tally "$name") in $((SECONDS - began)) s" | tee -a "$WORK/tallies"
}

tally() { # NAME
    jq -r 'map(.state) as $states | ["passed", "failed", "skipped"]
        | map(. as $state | "\([$states[] | select(. == $state)] | length) \($state)") | join(", ")' "$RESULTS/$1.json"
}

# Lines of a test's state without the plugin, with it, and its name.
differences() { # WITHOUT WITH
    jq -nr --slurpfile without "$RESULTS/$1.json" --slurpfile with "$RESULTS/$2.json" '
        def by_name: map({(.name): .state}) | add // {};
        ($without[0] | by_name) as $without | ($with[0] | by_name) as $with
        | $without + $with | keys[] | select($without[.] != $with[.])
        | "\($without[.] // "absent")\t\($with[.] // "absent")\t\(.)"'
}

# How a test has ended in several runs, in any order.
states_in() { # TEST NAME...
    local test=$1 name
    for name in "${@:2}"; do
        jq -r --arg test "$test" '.[] | select(.name == $test).state' "$RESULTS/$name.json"
    done | sort | paste -sd ' '
}

# Runs what differs twice more in both ways; the plugin runs at first, and no longer at the end. What differs again is in
# $WORK/real, the rest in $WORK/flaky.
run_again() {
    local focus=() run without with test
    # Names as regular expressions.
    mapfile -t focus < <(cut -f 3 "$WORK/differences" | sed 's/[][\.*^$+?(){}|]/\\&/g; s/.*/--ginkgo.focus=&$/')
    for run in 1 2; do
        run_critest "with-again-$run" "${focus[@]}"
    done
    stop_plugin
    for run in 1 2; do
        run_critest "without-again-$run" "${focus[@]}"
    done
    while IFS=$'\t' read -r without with test; do
        without+=", $(states_in "$test" without-again-1 without-again-2)"
        with+=", $(states_in "$test" with-again-1 with-again-2)"
        if [[ ${without#*, } == "${with#*, }" ]]; then
            printf '%s\t%s\t%s\n' "$without" "$with" "$test" >>"$WORK/flaky"
        else
            printf '%s\t%s\t%s\n' "$without" "$with" "$test" >>"$WORK/real"
        fi
    done <"$WORK/differences"
}

# --- the report -------------------------------------------------------------------------------------

table() { # FILE
    { printf 'without\twith\ttest\n' && cat "$1"; } | awk -F '\t' '{ printf "  %-24s %-24s %s\n", $1, $2, $3 }'
}

report() {
    local pair
    if [[ -s $WORK/real ]]; then
        printf '\nDifferences (the first run, then two more):\n'
        table "$WORK/real"
        echo "  Why: $RESULTS/*.log"
    fi
    if [[ -s $WORK/flaky ]]; then
        printf '\nDiffered once, and not in two more runs in both ways (the first run, then these):\n'
        table "$WORK/flaky"
    fi
    printf '\nFailed on this machine without the plugin:\n'
    jq -r 'map(select(.state == "failed") | "  \(.name)\n      \(.why)") | if . == [] then "  none" else .[] end' \
        "$RESULTS/without.json"
    printf '\nSkipped without the plugin:\n'
    jq -r --args '
        ($ARGS.positional | map(split("|") | {part: .[0], why: .[1]})) as $left_out
        | map(select(.state == "skipped") | .name as $name
            | .why = if .why != "" then .why
                elif .name | test("benchmark") then "measures, and tests nothing"
                else ([$left_out[] | .part as $part | select($name | test($part)).why][0] // "not asked for") end)
        | group_by(.why)[] | "  \(length): \(.[0].why)", (if .[0].why == "not asked for" then empty else .[] | "      \(.name)" end)
        ' "${LEFT_OUT[@]}" <"$RESULTS/without.json"
    printf '\ncritest %s, containerd %s, seed %s\n' "$CRITEST_VERSION" "$CONTAINERD" "$SEED"
    sed -n 's/^.*critest, \(with\|without\): /\1 the plugin: /p' "$WORK/tallies"
}

# --- all of it --------------------------------------------------------------------------------------

# The tests with the host's IPC namespace leave segments of this size behind.
segments() {
    ipcs -m | awk '$5 == 1048576 && $6 == 0 { print $2 }' | sort
}

# shellcheck disable=SC2317 # called by a trap
take_down() {
    local process mount segment
    for process in "${ENDING[@]}"; do
        kill "$process" 2>/dev/null || true
    done
    [[ ! -d ${REPRISE_NODES:-/tmp/reprise-nodes}/$NODE ]] || "$HERE/node.sh" down "$NODE" || true
    for segment in $(comm -13 "$WORK/segments" <(segments)); do
        ipcrm -m "$segment" || true
    done
    # A test that was interrupted has left its mounts.
    awk -v under="$WORK/" 'index($5, under) == 1 { print $5 }' /proc/self/mountinfo | tac | while read -r mount; do
        umount -l "$mount" || true
    done
    rm -rf --one-file-system "$WORK"
}

main() {
    parse_options "$@"
    ((EUID == 0)) || die "critest.sh must be root: it brings up a node"
    "$HERE/node.sh" build --containerd "$CONTAINERD"
    ensure_critest
    build_plugin
    # The tests ask pods by their addresses.
    unset http_proxy HTTP_PROXY https_proxy HTTPS_PROXY all_proxy ALL_PROXY

    ENDING=()
    WORK=$(mktemp -d)
    # For the files of pods with a user namespace of their own.
    chmod 711 "$WORK"
    mkdir -m 1777 "$WORK/tmp"
    segments >"$WORK/segments"
    trap take_down EXIT
    trap 'exit 130' INT TERM
    bring_up
    start_registry

    local focus=() failed=0
    [[ -z $FOCUS ]] || focus=(--ginkgo.focus="$FOCUS")
    rm -f "$RESULTS"/*.{json,log}
    run_critest without "${focus[@]}"
    start_plugin
    run_critest with "${focus[@]}"
    plugin_is_well || failed=1
    differences without with >"$WORK/differences"
    [[ ! -s $WORK/differences ]] || run_again
    report
    if [[ -s $WORK/real ]]; then
        failed=1
        echo "the plugin makes a difference"
    else
        echo "no difference in any test"
    fi
    exit "$failed"
}

main "$@"
