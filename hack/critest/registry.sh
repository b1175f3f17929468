#!/usr/bin/env bash
# A container registry that has an image of every name that anybody asks for, whatever the tag: a CGI program, whose files are
# in BLOBS, by their SHA-256, and whose images all have the one layer LAYER (its SHA-256). What is in it is by critest.sh.
set -euo pipefail

readonly MANIFEST=application/vnd.oci.image.manifest.v1+json

answer() { # STATUS TYPE DIGEST FILE
    printf 'Status: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n' "$1" "$2" "$(stat -c %s "$4")"
    [[ -z $3 ]] || printf 'Docker-Content-Digest: sha256:%s\r\n' "$3"
    printf '\r\n'
    [[ $REQUEST_METHOD == HEAD ]] || cat "$4"
}

# Keeps standard input under its own digest, and prints that. Others may be doing the same.
keep() {
    local file digest
    file=$(mktemp "$BLOBS/new.XXXXXX")
    cat >"$file"
    digest=$(sha256sum "$file" | cut -d ' ' -f 1)
    mv "$file" "$BLOBS/$digest"
    echo "$digest"
}

# What sets the images apart, by the last part of their names.
config_of() { # NAME
    local user='' port=80 command='["/bin/sh"]'
    case $1 in
    hostnet-nginx*) port=12003 command='["/sbin/nginx", "master process"]' ;;
    nginx | httpd) command='["/sbin/nginx", "master process"]' ;;
    nonewprivs) command='["/sbin/effective-uid"]' ;;
    *-user-uid) user=1002 ;;
    *-user-username) user=www-data ;;
    *-user-uid-group) user=1003:users ;;
    *-user-username-group) user=www-data:www-data ;;
    *-predefined-group) user=1000 ;;
    esac
    jq -nc --arg name "$1" --arg user "$user" --arg port "$port" --argjson command "$command" --arg layer "sha256:$LAYER" \
        --arg arch "$ARCH" '{
        architecture: $arch, os: "linux", created: "1970-01-01T00:00:00Z",
        config: {User: $user, Cmd: $command, WorkingDir: "/", Labels: {name: $name},
            Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PORT=" + $port]},
        rootfs: {type: "layers", diff_ids: [$layer]},
        history: [{created: "1970-01-01T00:00:00Z"}]}'
}

manifest_of() { # NAME
    local config
    config=$(config_of "$1" | keep)
    jq -nc --arg type "$MANIFEST" --arg config "$config" --argjson config_size "$(stat -c %s "$BLOBS/$config")" \
        --arg layer "$LAYER" --argjson layer_size "$(stat -c %s "$BLOBS/$LAYER")" '{
        schemaVersion: 2, mediaType: $type,
        config: {mediaType: "application/vnd.oci.image.config.v1+json", digest: "sha256:\($config)", size: $config_size},
        layers: [{mediaType: "application/vnd.oci.image.layer.v1.tar", digest: "sha256:\($layer)", size: $layer_size}]}'
}

# PATH_INFO is /NAME/manifests/TAG, /NAME/manifests/DIGEST or /NAME/blobs/DIGEST.
main() {
    local reference=${PATH_INFO##*/} kind name type=application/octet-stream digest
    kind=${PATH_INFO%/*} name=${kind%/*}
    kind=${kind##*/}
    [[ $kind != manifests ]] || type=$MANIFEST
    if [[ $reference == sha256:* ]]; then
        digest=${reference#sha256:}
    elif [[ $kind == manifests ]]; then
        digest=$(manifest_of "${name##*/}" | keep)
    fi
    if [[ ${digest:-} =~ ^[0-9a-f]{64}$ && -e $BLOBS/$digest ]]; then
        answer '200 OK' "$type" "$digest" "$BLOBS/$digest"
    else
        answer '404 Not Found' application/json '' /dev/null
    fi
}

main
