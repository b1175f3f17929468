#!/usr/bin/env bash
# Metrics, alert rules and dashboard, checked by what reads them: Prometheus' promtool. See README.md beside this file.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done
readonly FILES=$HERE/../deploy/chart/files TABLE=$HERE/../docs/operate.md

usage() {
    cat <<END
usage: metrics.sh check [--if-built]   all of it, with the metrics that a test of the plugin's makes up.
                                       --if-built: where promtool is not built, say so, and no more
       metrics.sh text ADDRESS         the metrics that a plugin serves there, as 127.0.0.1:9808
       metrics.sh picture [MINUTES]    draws docs/dashboard.svg: the dashboard, after pods have restarted for so long on the
                                       node of REPRISE_NODE_ENV (hack/node.sh), 10 minutes unless it is said
END
}

promtool() { "$(promtool_bin)/promtool" "$@"; }

# As a test has it, which has counted all that there is.
text_of_test() {
    cargo test --quiet --locked --manifest-path "$HERE/../Cargo.toml" --package reprise --lib -- --exact --nocapture \
        metrics::tests::a_scrape_can_be_read_and_has_every_family | sed -n '/^# HELP/,/^# EOF/p'
}

# The same in the format that is older than OpenMetrics, the only one that promtool lints.
classic() { # FILE
    awk 'NR == FNR { if ($2 == "TYPE") kind[$3] = $4; next }
        $2 == "UNIT" || $2 == "EOF" { next }
        $1 == "#" {
            if (kind[$3] == "counter") $3 = $3 "_total"
            if (kind[$3] == "info") { $3 = $3 "_info"; sub(/ info$/, " gauge") }
        }
        { print }' "$1" "$1"
}

check_text() { # FILE
    grep -q '^reprise_build_info{' "$1" || die "there are no metrics"
    classic "$1" | promtool check metrics || die "the metrics are not as they are to be"
    # Only for this it reads OpenMetrics, and every sample needs a time.
    awk '!/^#/ { $0 = $0 " 1700000000" } { print }' "$1" >"$WORK/timed"
    promtool tsdb create-blocks-from openmetrics --quiet "$WORK/timed" "$WORK/blocks" || die "this is not OpenMetrics"
}

# Names of series, without what Prometheus makes of a histogram.
names() { grep -oE 'reprise_[a-z_]+' "$@" | sed -E 's/_(bucket|count|sum)$//' | sort -u; }

# Those of the dashboard, with Grafana's variables filled in.
# shellcheck disable=SC2016
expressions() {
    jq -r '.. | .expr? // empty' "$FILES/dashboard.json" |
        sed -e 's/\$__rate_interval/5m/g' -e 's/\$__range/6h/g' -e 's/\$instance/.*/g'
}

check_rules() {
    promtool check rules "$FILES/alerts.yaml"
    (cd "$HERE/metrics" && promtool test rules alerts.yaml)
    expressions | jq -R '{record: ("dashboard:" + (input_line_number | tostring)), expr: .}' |
        jq -s '{groups: [{name: "dashboard", rules: .}]}' >"$WORK/dashboard.yaml"
    promtool check rules "$WORK/dashboard.yaml"
}

# Nobody asks for what is not there, and the table has all that is.
check_names() { # FILE
    local missing
    names -h "$1" <(classic "$1") >"$WORK/names"
    missing=$({ cat "$FILES/alerts.yaml" && expressions; } | names - | comm -23 - "$WORK/names")
    [[ -z $missing ]] || die "no such metrics: $missing"
    missing=$(classic "$1" | sed -n 's/^# TYPE \([a-z_]*\) .*/\1/p' | sort -u | comm -23 - <(names "$TABLE"))
    [[ -z $missing ]] || die "not in docs/operate.md: $missing"
    missing=$(names "$TABLE" | comm -23 - "$WORK/names")
    [[ -z $missing ]] || die "in docs/operate.md, but nowhere else: $missing"
}

check() { # [--if-built]
    if [[ ${1:-} == --if-built && ! -e $(promtool_bin) ]]; then
        echo "metrics, alerts and dashboard are not checked: promtool is not built (hack/metrics.sh check)"
        return
    fi
    ensure_promtool
    text_of_test >"$WORK/text"
    check_text "$WORK/text"
    check_rules
    check_names "$WORK/text"
    echo "metrics, alerts and dashboard are in order"
}

# --- the picture ----------------------------------------------------------------------------------

readonly LISTEN=127.0.0.1:9818 PROMETHEUS=127.0.0.1:9819
# Seconds between scrapes, and what Grafana makes of it.
readonly SCRAPE=5 RATE=60

picture() { # [MINUTES]
    local minutes=${1:-10} begin end
    ((minutes > 1)) || die "a minute is too short"
    [[ -n ${REPRISE_NODE_ENV:-} ]] || die "on which node? REPRISE_NODE_ENV names its file (hack/node.sh up)"
    set -a
    # shellcheck source=/dev/null
    source "$REPRISE_NODE_ENV"
    set +a
    ensure_prometheus
    trap stop_picture EXIT
    start_plugin
    start_prometheus
    begin=$(date +%s)
    pods | "$KUBECTL" create -f - >/dev/null
    say "pods restart for $minutes minutes"
    end=$((begin + minutes * 60))
    while (($(date +%s) < end)); do
        keep_going
    done
    answers "$begin" "$end" >"$WORK/panels.json"
    jq -r --argjson from "$begin" --argjson to "$end" --argjson step "$SCRAPE" -f "$HERE/metrics/picture.jq" \
        "$WORK/panels.json" >"$WORK/dashboard.svg"
    cp "$WORK/dashboard.svg" "$HERE/../docs/dashboard.svg"
    say "docs/dashboard.svg is drawn; panels that show nothing: $(jq -r '[.[] | select([.answers[]?.data.result[]] == [] and .type != "row").title]
        | if . == [] then "none" else join(", ") end' "$WORK/panels.json")"
}

pods() { sed -e "s/NODE/$NODE_NAME/" -e "s|IMAGE|$BUSYBOX_IMAGE|" "$HERE/metrics/pods.yaml"; }

start_plugin() {
    local target
    cd "$HERE/.."
    cargo build --locked --quiet
    target=$(cargo metadata --locked --no-deps --format-version 1 | jq -r .target_directory)
    "$target/debug/reprise" run --nri-socket "$NRI_SOCKET" --cri-endpoint "$CRI_ENDPOINT" --kubeconfig "$PLUGIN_KUBECONFIG" \
        --node-name "$NODE_NAME" --run-dir "$WORK/run" --state-dir "$WORK/state" --listen "$LISTEN" --back-off-floor 0 \
        >"$WORK/plugin.log" 2>&1 &
    await "http://$LISTEN/readyz" "$WORK/plugin.log"
}

start_prometheus() {
    jq -n --arg target "$LISTEN" --arg instance node-1 --arg every "${SCRAPE}s" '{
        global: {scrape_interval: $every},
        scrape_configs: [{job_name: "reprise", static_configs: [{targets: [$target], labels: {instance: $instance}}]}]
    }' >"$WORK/prometheus.yaml"
    "$(prometheus_bin)/prometheus" --config.file "$WORK/prometheus.yaml" --storage.tsdb.path "$WORK/tsdb" \
        --web.listen-address "$PROMETHEUS" >"$WORK/prometheus.log" 2>&1 &
    await "http://$PROMETHEUS/-/ready" "$WORK/prometheus.log"
}

await() { # URL LOG
    for ((i = 0; i < 240; i++)); do
        ! curl -sf --noproxy '*' "$1" >/dev/null || return 0
        sleep 0.25
    done
    tail -n 5 "$2" >&2
    die "no answer at $1"
}

# For a minute, at the end of which some are made anew: what has failed for good, and what the kubelet would not start again
# without a back-off of its own.
keep_going() {
    "$KUBECTL" annotate --overwrite pod picture-asked "restart-request.reprise.dev/pod=$(date +%s)" >/dev/null
    sleep 50
    "$KUBECTL" delete pod -l picture=anew >/dev/null
    pods | "$KUBECTL" create -f - >/dev/null 2>&1 || true # the others are there
}

# The panels, each with what Prometheus says to its queries.
# shellcheck disable=SC2016
answers() { # BEGIN END
    local panel expr
    jq -c '.panels[]' "$FILES/dashboard.json" | while read -r panel; do
        jq -r '.targets // [] | .[].expr' <<<"$panel" |
            sed -e "s/\$__rate_interval/${RATE}s/g" -e "s/\$__range/$(($2 - $1))s/g" -e 's/\$instance/.*/g' |
            while read -r expr; do
                curl -sSf --noproxy '*' "http://$PROMETHEUS/api/v1/query_range" --data-urlencode "query=$expr" \
                    --data "start=$1&end=$2&step=$SCRAPE"
            done | jq -s --argjson panel "$panel" '$panel + {answers: .}'
    done | jq -s .
}

# shellcheck disable=SC2317 # called by a trap
stop_picture() {
    pods | "$KUBECTL" delete --ignore-not-found --wait --timeout 60s -f - >/dev/null 2>&1 || true
    # shellcheck disable=SC2046 # a process each
    kill $(jobs -p) 2>/dev/null || true
    wait
    rm -rf "$WORK"
}

main() {
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    case ${1:-help} in
    check) check "${@:2}" ;;
    text)
        ensure_promtool
        curl -sSf --noproxy '*' "http://${2:?text needs an address}/metrics" >"$WORK/text"
        check_text "$WORK/text"
        ;;
    picture) picture "${@:2}" ;;
    *) usage && [[ ${1:-help} == help ]] ;;
    esac
}

main "$@"; exit
