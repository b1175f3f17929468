#!/usr/bin/env bash
# The demo as it went on this machine, in a picture that moves: docs/demo.svg.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"

readonly TERMTOSVG=1.1.0
readonly OUT=$HERE/../docs/demo.svg
# Columns and rows: the whole of the last table, and what came before it.
readonly SCREEN=104x40

usage() {
    cat <<END
usage: hack/cast.sh
Plays the demo and draws it: $(basename "$OUT"). Build first (make demo does), or the picture begins with that.
END
}

main() {
    (($# == 0)) || { usage && [[ $1 == @(-h|--help) ]] && exit; exit 2; }
    local tool=$CACHE/tools/termtosvg-$TERMTOSVG
    if [[ ! -x $tool/bin/termtosvg ]]; then
        python3 -m venv "$tool"
        "$tool/bin/pip" install --quiet "termtosvg==$TERMTOSVG"
    fi
    # Steps of the pod's are a second apart; what waits for longer shows nothing. The recorder wants a terminal of its own.
    local options="--screen-geometry $SCREEN --template gjm8 --min-frame-duration 100 --max-frame-duration 1500 --loop-delay 15000"
    script --quiet --return --command "'$tool/bin/termtosvg' '$OUT' --command '$HERE/demo.sh' $options" /dev/null </dev/null
    say "drew $(du -k "$OUT" | cut -f1) KiB"
}

main "$@"
