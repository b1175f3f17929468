#!/usr/bin/env bash
# Everything that can be said about the code without running it: format, lints, the oldest compiler,
# what it depends on, and the scripts.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"
cd "$HERE/.."

readonly DENY_VERSION=0.20.2
PATH=$PATH:$CACHE/tools/bin

step() { printf '\n== %s\n' "$*"; }

# The oldest compiler that Cargo.toml promises must do; says whether exactly that one was tried.
check_oldest_compiler() {
    local oldest current installed
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    current=$(rustc --version | cut -d ' ' -f 2)
    [[ -n $oldest ]] || die "Cargo.toml has no rust-version"
    if [[ $(printf '%s\n' "$oldest" "$current" | sort --version-sort | head -n 1) != "$oldest" ]]; then
        die "rustc $current is older than $oldest, which Cargo.toml asks for"
    fi
    if [[ $current == "$oldest" || $current == "$oldest".* ]]; then
        echo "rustc $current is the oldest that is supported: every check here is made with it"
        return
    fi
    installed=$(rustup toolchain list 2>/dev/null | grep -oE "^${oldest//./\\.}(\.[0-9]+)?-[^ ]+" | head -n 1) || true
    if [[ -n $installed ]]; then
        cargo "+$installed" check --locked --all-targets
        echo "checked with $installed, the oldest that is supported"
    else
        echo "not checked with rustc $oldest, the oldest that is supported: it is not installed"
    fi
}

check_dependencies() {
    command -v cargo-deny >/dev/null || ensure_tool cargo-deny "$DENY_VERSION"
    cargo deny --locked check --hide-inclusion-graph bans licenses sources
    # The database of advisories is on the network, and no reason to fail where there is none.
    if cargo deny --locked fetch db >/dev/null 2>&1; then
        cargo deny --locked check --disable-fetch --hide-inclusion-graph advisories
    else
        echo "advisories not checked: their database cannot be fetched"
    fi
}

# The crate that is for others must be whole without the rest of this tree.
check_publishing() {
    local package=(--locked --allow-dirty --package nri)
    local said
    said=$(mktemp)
    if ! cargo publish --dry-run "${package[@]}" 2>"$said"; then
        cat "$said" >&2
        # Without the network only the registry is not asked.
        grep -qiE 'failed to (fetch|download|update|query)|could not (resolve|connect)|network|timed out' "$said" ||
            die "the crate nri cannot be published"
        cargo package --offline "${package[@]}"
    fi
    rm -f "$said"
}

check_scripts() {
    if ! command -v shellcheck >/dev/null; then
        echo "installing shellcheck"
        { apt-get install -qq -y shellcheck || { apt-get update -qq && apt-get install -qq -y shellcheck; }; } \
            >/dev/null || die "shellcheck is missing: install it"
    fi
    local scripts=(hack/*.sh hack/critest/*.sh deploy/kubectl_complete-reprise)
    [[ ! -e .ci/run ]] || scripts+=(.ci/run)
    shellcheck --external-sources "${scripts[@]}"
}

# What rustup's minimal profile leaves out, and a compiler for what is built below.
prepare() {
    local component
    for component in rustfmt clippy; do
        cargo "${component/rust/}" --version >/dev/null 2>&1 || rustup component add "$component" ||
            die "$component is missing: rustup component add $component"
    done
    command -v cc >/dev/null || hack/node.sh packages || die "cc is missing: install gcc and libc6-dev"
}

prepare
step "format"
cargo fmt --all --check
step "lints"
cargo clippy --locked --all-targets -- -D warnings
step "documentation"
RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --package nri
step "oldest compiler"
check_oldest_compiler
step "dependencies"
check_dependencies
step "publishing"
check_publishing
step "scripts"
check_scripts
step "chart"
# Helm takes minutes to build the first time: too long for whoever wants to lint.
hack/chart.sh check --if-built
step "metrics"
hack/metrics.sh check --if-built
step "planted bugs"
# Each can still be put in.
git apply --check tests/planted/*.patch
