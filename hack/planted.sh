#!/usr/bin/env bash
# Puts each bug of tests/planted into a copy of the tree, one at a time, and plays the simulator: it must find every one.
# What each bug does stands at the head of its patch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TREE=${REPRISE_CACHE:-$HOME/.cache/reprise}/planted
# Not that of this tree: its tests would then be taken for up to date with a bug in them.
export CARGO_TARGET_DIR=$TREE/target

usage() {
    cat <<END
usage: hack/planted.sh [PATCH]...
Without a PATCH, all of tests/planted. Some four minutes on two cores.
END
}

# How the simulator's run ends: the first line of what it complains of.
complaint() { # LOG
    sed -nE 's/^Test failed: (.*)$/\1/p; s/^([a-z].*: [0-9]+ times)$/never reached: \1/p' "$1" | head -n 1
}

find_bug() { # PATCH
    local log=$TREE/log code=0
    if ! patch --quiet --strip=1 --directory "$TREE/tree" <"$1"; then
        printf 'BROKEN  %s: it does not apply\n' "$(basename "$1" .patch)"
        return 1
    fi
    (cd "$TREE/tree" && cargo test --locked --quiet --package reprise --lib -- --nocapture sim::) >"$log" 2>&1 || code=$?
    patch --quiet --strip=1 --reverse --directory "$TREE/tree" <"$1"
    local found
    found=$(complaint "$log")
    if ((code)) && [[ -n $found ]]; then
        printf 'found   %s: %s\n' "$(basename "$1" .patch)" "$found"
    elif ((code)); then
        printf 'BROKEN  %s: not the simulator failed, but:\n' "$(basename "$1" .patch)"
        tail -n 20 "$log"
        return 1
    else
        printf 'MISSED  %s\n' "$(basename "$1" .patch)"
        return 1
    fi
}

main() {
    case ${1-} in
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    esac
    local patches=("$@")
    (($#)) || patches=(tests/planted/*.patch)
    # The times of unchanged files stay: only what differs is built.
    rm -rf "$TREE/tree"
    mkdir -p "$TREE/tree"
    git ls-files -z | tar --null --files-from=- --create | tar --extract --directory "$TREE/tree"

    local patch failed=0
    for patch in "${patches[@]}"; do
        find_bug "$patch" || failed=$((failed + 1))
    done
    printf '%d of %d planted bugs found\n' $((${#patches[@]} - failed)) "${#patches[@]}"
    ((failed == 0))
}

main "$@"
