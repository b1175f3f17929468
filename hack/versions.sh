#!/usr/bin/env bash
# Says which newer versions of what is tested exist, so that the next one is noticed. Asks the Go module proxy.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done

usage() {
    cat <<END
usage: hack/versions.sh
Prints a line for each version that is newer than the newest tested one of its minor, or than all of them.
Exit code 1 if the module proxy does not answer.
END
}

minors() { cut -d. -f1-2 | sort --version-sort -u; }

newest() { sort --version-sort | tail -n 1; }

# The newest of a minor among those on standard input; nothing if there is none.
newest_of() { # MINOR
    { grep "^${1//./\\.}\." || true; } | newest
}

is_newer() { # VERSION THAN
    [[ $1 != "$2" && $(printf '%s\n' "$1" "$2" | newest) == "$1" ]]
}

check() { # MODULE NAME TESTED...
    local module=$1 name=$2 there minor last ours
    shift 2
    there=$(cd / && go list -m -versions "$module") || die "cannot list the versions of $module"
    # Releases alone, without the v.
    there=$(tr ' ' '\n' <<<"$there" | sed -n 's/^v\([0-9.]*\)$/\1/p')
    for minor in $(minors <<<"$there"); do
        last=$(newest_of "$minor" <<<"$there")
        ours=$(printf '%s\n' "$@" | newest_of "$minor")
        if is_newer "$last" "${ours:-$(printf '%s\n' "$@" | newest)}"; then
            echo "$name $last is newer than what is tested: $*"
        fi
    done
}

main() {
    local one=() two=() version
    for version in "${CONTAINERD_VERSIONS[@]}"; do
        if [[ $version == 1.* ]]; then one+=("$version"); else two+=("$version"); fi
    done
    check k8s.io/kubernetes Kubernetes "${K8S_VERSIONS[@]}"
    check github.com/containerd/containerd containerd "${one[@]}"
    check github.com/containerd/containerd/v2 containerd "${two[@]}"
    check github.com/containerd/nri NRI "$NRI_VERSION"
    check k8s.io/cri-api CRI "$CRI_API_VERSION"
    check github.com/containerd/containerd/api "containerd's API" "$CONTAINERD_API_VERSION"
}

case ${1-} in
'') main ;;
-h | --help) usage ;;
*) usage >&2 && exit 2 ;;
esac
