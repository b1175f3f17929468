#!/usr/bin/env bash
# A Debian package for this machine's architecture: the static executable, manual pages, completions, and what runs it.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
# shellcheck source=/dev/null
source "$HERE/lib.sh"
cd "$HERE/.."

readonly CARGO_DEB_VERSION=3.8.0

usage() {
    cat <<END
usage: hack/package.sh [DIR]   puts reprise_VERSION_ARCH.deb there (default: target/package)
END
}

main() {
    local dir=target/package arch
    case ${1-} in
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    ?*) dir=$1 ;;
    esac
    arch=$(dpkg --print-architecture)
    "$HERE/image.sh" --arch "$arch"
    ensure_tool cargo-deb "$CARGO_DEB_VERSION"
    rm -rf target/package
    install -D -m 755 "target/image-$arch/$arch/reprise" target/package/reprise
    # For kubectl, which runs it as `kubectl reprise`.
    ln -s reprise target/package/kubectl-reprise
    say "writing the manual pages"
    cargo run --locked --quiet --example manual -- target/package
    "$CACHE/tools/bin/cargo-deb" --quiet --no-build --no-strip --output "$dir/"
    say "$(ls "$dir"/reprise_*.deb)"
}

main "$@"
