#!/usr/bin/env bash
# Reads mutated input with the real code, guided by coverage (tests/fuzz): each target for so long, as many side by side as
# there are cores. Fails if any input makes it panic, allocate more than 16 MiB or take more than 50 ms, and keeps that
# input. A table at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly CORPUS=tests/fuzz/corpus
readonly TARGET_DIR=${CARGO_TARGET_DIR:-target}/fuzz
readonly HOST=x86_64-unknown-linux-gnu
# What libFuzzer needs to see, as cargo-fuzz has it, but for comparisons: to trace those takes several times as long as the
# reading, and what words mean something the mutation knows. `--target` keeps it away from build scripts and macros.
readonly FLAGS="--cfg fuzzing -D warnings -C passes=sancov-module
    -C llvm-args=-sanitizer-coverage-level=3
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters
    -C llvm-args=-sanitizer-coverage-pc-table"

usage() {
    cat <<END
usage: hack/fuzz.sh [--seconds N] [--seed N] [--build] [TARGET]...
  --seconds N  each target for so long (default 60)
  --seed N     the same search each time, from the committed corpus alone (default: go on from what was found before)
  --build      only build
Targets: $(all_targets)
A failed input is seen again with: cargo test --test fuzz -- /PATH/OF/TARGET/FILE
END
}

all_targets() {
    find "$CORPUS" -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort | xargs
}

# The largest input, in bytes. Tenants write 256 KiB of annotations at most (`TotalAnnotationSizeLimitB`, apimachinery). The
# others are trusted not to send what is merely large: to read that takes its time. They send some KiB a container.
longest() { # TARGET
    case $1 in
    annotations) echo 262144 ;;
    nri-*) echo 8192 ;;
    hook-lines) echo 4096 ;;
    check) echo 16384 ;;
    manifests) echo 32768 ;;
    *) echo 65536 ;;
    esac
}

build() {
    # libFuzzer is C++.
    command -v g++ >/dev/null || hack/node.sh packages
    RUSTFLAGS=$(xargs <<<"$FLAGS") CARGO_TARGET_DIR=$TARGET_DIR cargo test --locked --quiet --package reprise-fuzz \
        --profile fuzz --target "$HOST" --no-run --message-format=json |
        jq -r 'select(.executable != null and .target.name == "fuzz") | .executable'
}

# New inputs go to the first corpus, which lasts for as long as the build directory if there is no seed; a failed one beside
# it.
fuzz() { # TARGET
    local target=$1 corpus=$TARGET_DIR/corpus/$1 failed=$TARGET_DIR/failed/$1 code=0
    [[ -z $SEED ]] || corpus=$WORK/$target/corpus
    mkdir -p "$corpus" "$failed" "$WORK/$target"
    TMPDIR=$WORK/$target REPRISE_FUZZ=$target REPRISE_FUZZ_COSTS=$WORK/$target.costs \
        nice "$FUZZER" -max_total_time="$SECONDS_EACH" -max_len="$(longest "$target")" -timeout=10 -rss_limit_mb=4096 \
        -seed="${SEED:-0}" -reload=0 -print_final_stats=1 -artifact_prefix="$(realpath "$failed")/" "$corpus" "$CORPUS/$target" \
        >"$WORK/$target.log" 2>&1 || code=$?
    if ((code)); then
        # From the first complaint on.
        sed -nE '/panicked at|ERROR:/,$p' "$WORK/$target.log" | head -n 40 >&2
        printf 'FAILED %s; see it again: cargo test --test fuzz -- %s\n' "$target" \
            "$(sed -n 's/.*Test unit written to //p' "$WORK/$target.log" | tail -n 1)" >&2
    fi
    report "$target" "$code" >"$WORK/$target.row"
    return "$code"
}

report() { # TARGET CODE
    local inputs coverage bytes=0 us=0
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$WORK/$1.log")
    # Where it failed there are no final figures.
    [[ -n $inputs ]] || inputs=$(sed -n 's/^#\([0-9]*\).*/\1/p' "$WORK/$1.log" | tail -n 1)
    coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$WORK/$1.log" | tail -n 1)
    [[ ! -e $WORK/$1.costs ]] || read -r bytes us <"$WORK/$1.costs"
    printf '| %s | %s | %s | %d.%d | %d.%d | %s |\n' "$1" "${inputs:-0}" "${coverage:-0}" \
        $((bytes >> 20)) $(((bytes >> 10) % 1024 * 10 / 1024)) $((us / 1000)) $((us % 1000 / 100)) \
        "$( (($2)) && echo failed || echo passed)"
}

main() {
    SECONDS_EACH=60 SEED=''
    local targets=() only_build=''
    while (($#)); do
        case $1 in
        --seconds) SECONDS_EACH=${2:?--seconds needs a number} && shift ;;
        --seed) SEED=${2:?--seed needs a number} && shift ;;
        --build) only_build=yes ;;
        -h | --help) usage && exit ;;
        -*) usage >&2 && exit 2 ;;
        *) targets+=("$1") ;;
        esac
        shift
    done
    ((${#targets[@]})) || read -ra targets <<<"$(all_targets)"
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    FUZZER=$(build)
    [[ -z $only_build ]] || exit 0

    local target failed=0
    for target in "${targets[@]}"; do
        while (($(jobs -rp | wc -l) >= $(nproc))); do
            wait -n || failed=1
        done
        fuzz "$target" &
    done
    while (($(jobs -p | wc -l))); do
        wait -n || failed=1
    done
    printf '\n%d s of each\n\n| target | inputs | edges reached | most memory, MiB | longest, ms | |\n|---|--:|--:|--:|--:|---|\n' \
        "$SECONDS_EACH"
    cat "$WORK"/*.row
    exit "$failed"
}

main "$@"
