#!/usr/bin/env bash
# Keeps docs/conformance.md true, and docs/kubelet.md: every scenario in them exists, and every scenario is in the first.
# Writes docs/played.md.
set -euo pipefail
export LC_ALL=C

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
readonly DOC=$HERE/../docs/conformance.md
readonly KUBELET=$HERE/../docs/kubelet.md
readonly PLAYED=$HERE/../docs/played.md COMPATIBILITY=$HERE/../docs/compatibility.md

usage() {
    cat <<END
usage: conformance.sh check           fail if a scenario in the tables does not exist, or one that exists is not in them;
                                      names as the runner lists them on standard input
       conformance.sh fill DIR        write docs/played.md from the runner's output, the files DIR/*.out
END
}

# Names in a document's tables; * stands for anything.
named() { # FILE
    grep '^|' "$1" | grep -oP '\x60[a-z0-9_*]*_[a-z0-9_*]*\x60' | tr -d '\140' | sort -u
}

check() {
    local wrong names all
    names=$(cat)
    all=$(grep -c ' (' <<<"$names")
    grep -q "^Of $all scenarios," "$COMPATIBILITY" || {
        echo "there are $all scenarios, and docs/compatibility.md says otherwise" >&2
        return 1
    }
    wrong=$(awk '
        FNR == 1 { file++ }
        file < 3 {
            pattern = "^" $1 "$"
            gsub(/\*/, "[a-z0-9_]*", pattern)
            patterns[file, $1] = pattern
            next
        }
        / \(/ {
            promised = 0
            for (key in patterns) {
                if ($1 !~ patterns[key]) continue
                exists[key] = 1
                split(key, part, SUBSEP)
                if (part[1] == 1) promised = 1
            }
            if (!promised) print $1 " is in no table of docs/conformance.md"
        }
        END {
            for (key in patterns) {
                split(key, part, SUBSEP)
                if (!(key in exists)) print part[2] " is in docs/, and there is no such scenario"
            }
        }' <(named "$DOC") <(named "$KUBELET") - <<<"$names" | sort -u)
    [[ -z $wrong ]] || {
        echo "$wrong" >&2
        return 1
    }
}

# One line for each scenario played: what it was played on, its name, 1 if it passed, and the day.
results() { # DIR
    awk -v OFS='\t' '
        /^played on / {
            day = $3
            sub(":", "", day)
            sub(/^[^:]*: /, "")
            nodes = $0
        }
        ($1 == "ok" || $1 == "FAILED") && $3 == "s" && $4 != "the_plugin_ends_well" {
            print nodes, $4, $1 == "ok", day
        }' "$1"/*.out
}

fill() { # DIR
    local results
    results=$(results "$1")
    awk '
        function cell(good, all) { return all ? " " good + 0 " of " all " |" : " |" }
        BEGIN { FS = "\t" }
        NR == FNR { nodes[++columns] = $0; next }
        !($2 in seen) { seen[$2]; name[++rows] = $2 }
        {
            passed[$1] += $3; played[$1]++
            passed[$1, $2] += $3; played[$1, $2]++
            if ($4 > day[$1]) day[$1] = $4
        }
        END {
            print "# What was played on what"
            print ""
            print "Written by `hack/conformance.sh fill` from the runner'\''s output. [conformance.md](conformance.md) says what each"
            print "scenario shows. An empty cell: not played there, as what tells versions apart and has nothing to say on one."
            print ""
            print "| | played on | last | passed of played |"
            print "|---|---|---|--:|"
            for (c = 1; c <= columns; c++)
                printf "| %c | %s | %s |%s\n", 64 + c, nodes[c], day[nodes[c]], cell(passed[nodes[c]], played[nodes[c]])
            print ""
            printf "| scenario |"
            for (c = 1; c <= columns; c++) printf " %c |", 64 + c
            printf "\n|---|"
            for (c = 1; c <= columns; c++) printf "--:|"
            printf "\n"
            for (r = 1; r <= rows; r++) {
                printf "| `%s` |", name[r]
                for (c = 1; c <= columns; c++) printf "%s", cell(passed[nodes[c], name[r]], played[nodes[c], name[r]])
                printf "\n"
            }
        }' <(cut -f1 <<<"$results" | sort --unique --version-sort) \
        <(sort --field-separator=$'\t' --key=2,2 <<<"$results") >"$PLAYED"
}

case ${1:-} in
check) check ;;
fill) fill "${2:?fill needs a directory}" ;;
*) usage >&2 && exit 2 ;;
esac
