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
    *) usage && [[ ${1:-help} == help ]] ;;
    esac
}

main "$@"; exit
