#!/usr/bin/env bash
# Keeps docs/conformance.md true, and docs/kubelet.md: every scenario in them exists, and the numbers are the runner's.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
readonly DOC=$HERE/../docs/conformance.md
readonly KUBELET=$HERE/../docs/kubelet.md

usage() {
    cat <<END
usage: conformance.sh check           fail if a scenario in the tables does not exist; their names on standard input
       conformance.sh fill DIR        write the numbers from the runner's output, DIR/KUBELET-CONTAINERD.out;
                                      kubelets without any keep theirs
END
}

named() { grep -h '^|' "$DOC" "$KUBELET" | grep -oP '\x60[a-z0-9_]*_[a-z0-9_]*\x60' | tr -d '\140' | sort -u; }

check() {
    local missing
    missing=$(comm -23 <(named) <(cut -d' ' -f1 | sort -u))
    [[ -z $missing ]] || {
        echo "docs/ names scenarios that do not exist:" >&2
        echo "$missing" >&2
        return 1
    }
}

# A row's scenarios stand in its second column, the five versions in those that follow.
fill() { # DIR
    local new
    new=$(mktemp)
    awk -v dir="$1" '
        function read_results(minor,    command, file, line, word) {
            command = "ls " dir "/" minor ".*.out 2>/dev/null"
            while ((command | getline file) > 0) {
                is_here[minor] = 1
                while ((getline line < file) > 0) {
                    split(line, word, " ")
                    if (word[1] == "ok") { passed[minor, word[4]]++; played[minor, word[4]]++ }
                    if (word[1] == "FAILED") played[minor, word[4]]++
                }
            }
        }
        BEGIN {
            FS = "|"; OFS = "|"
            for (i = 33; i <= 37; i++) read_results("1." i)
        }
        /^\|.*\x60[a-z0-9_]+_[a-z0-9_]+\x60.*\|/ && NF == 9 {
            count = split($3, name, "\x60")
            for (i = 33; i <= 37; i++) {
                good = all = 0
                for (n = 2; n <= count; n += 2) {
                    good += passed["1." i, name[n]]; all += played["1." i, name[n]]
                }
                if (is_here["1." i]) $(i - 29) = all ? " " good " of " all " " : " – "
            }
        }
        { print }' "$DOC" >"$new"
    cat "$new" >"$DOC"
    rm -f "$new"
}

case ${1:-} in
check) check ;;
fill) fill "${2:?fill needs a directory}" ;;
*) usage >&2 && exit 2 ;;
esac
