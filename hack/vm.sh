#!/usr/bin/env bash
# A virtual machine with Debian, systemd and cgroup v2, for what only a machine of its own can show: reboots, crashes,
# units. See README.md beside this file.
# shellcheck disable=SC2317 # functions are called by name
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE
for part in lib build images process; do
    # shellcheck source=/dev/null
    source "$HERE/$part.sh"
done

readonly VMS=${REPRISE_VMS:-/tmp/reprise-vms}
readonly DEBIANS=(12 13)
# The number goes up with what is in the image.
readonly IMAGE=1

# What runs it, and what runs in it beside NODE_PACKAGES.
readonly VM_PACKAGES=(busybox-static qemu-system-x86 qemu-utils debootstrap e2fsprogs openssh-client)
readonly GUEST_PACKAGES=(systemd systemd-sysv udev dbus libpam-systemd openssh-server linux-image-cloud-amd64
    initramfs-tools iptables conntrack kmod python3-minimal libseccomp2)

usage() {
    cat <<END
usage: vm.sh build [--debian V]          make the image of a machine, once
       vm.sh up NAME [OPTION]...         start a machine; returns when it answers
         --debian V                      ${DEBIANS[*]} (default ${DEBIANS[0]})
         --cpus N, --memory SIZE         default 2, 4G
         --reach PORT                    let it reach this machine's 127.0.0.1:PORT as $OUTSIDE:PORT; more than once
         --add FILE                      put FILE into /payload/bin, an executable without symbols; more than once
         --k8s V, --kubelet V, --containerd V    what a node in it can be made of, see node.sh
       vm.sh ssh NAME [COMMAND...]       run a command in it, as root
       vm.sh reboot NAME                 systemctl reboot; returns when it answers again
       vm.sh crash NAME                  kill it, without a word to what runs in it
       vm.sh start NAME                  start it again after that, or after it was shut down
       vm.sh down NAME                   end it and remove every trace
       vm.sh list                        machines and whether they run
In it the repository's scripts are where they are here, and node.sh has all that it needs. The machine is emulated,
several times slower than this one, and reaches nothing outside. Images: $CACHE/vm; machines: $VMS (REPRISE_VMS).
END
}

image_dir() { echo "$CACHE/vm/debian-$1-$IMAGE"; } # DEBIAN

# Chooses the machine that the functions below work on.
use_vm() { # NAME
    [[ $1 =~ ^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$ ]] ||
        die "'$1' is no name for a machine: up to 20 of a-z, 0-9 and - inside"
    VM=$1 DIR=$VMS/$1
    [[ ! -e $VMS ]] || must_be_ours "$VMS"
}

use_existing_vm() { # NAME
    use_vm "$1"
    [[ -e $DIR/settings ]] || die "there is no machine '$1'"
    # shellcheck source=/dev/null
    source "$DIR/settings"
}

parse_options() {
    DEBIAN=${DEBIANS[0]} CPUS=2 MEMORY=4G ADDED=() REACHED=()
    K8S=$DEFAULT_K8S KUBELET='' CONTAINERD=$DEFAULT_CONTAINERD
    while (($#)); do
        [[ $1 == @(--debian|--cpus|--memory|--add|--reach|--k8s|--kubelet|--containerd) ]] || die "unknown option '$1'"
        (($# > 1)) || die "$1 needs a value"
        case $1 in
        --debian) DEBIAN=$2 ;;
        --cpus) CPUS=$2 ;;
        --memory) MEMORY=$2 ;;
        --add) ADDED+=("$2") ;;
        --reach) REACHED+=("$2") ;;
        --k8s) K8S=${2#v} ;;
        --kubelet) KUBELET=${2#v} ;;
        --containerd) CONTAINERD=${2#v} ;;
        esac
        shift 2
    done
    KUBELET=${KUBELET:-$K8S}
    one_of "release of Debian" "$DEBIAN" "${DEBIANS[@]}"
}

# --- the image

codename() { # DEBIAN
    case $1 in
    12) echo bookworm ;;
    13) echo trixie ;;
    esac
}

# Where this machine has its packages from, if it is a Debian; debootstrap knows one otherwise.
mirror() {
    # shellcheck disable=SC2016 # apt's own variable
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1
}

build_image() { # DEBIAN TEMP, see build_once
    local debian=$1 temp=$2
    say "making an image of Debian $debian"
    # In memory: nobody waits for a disk after each package.
    mount -t tmpfs -o mode=755 tmpfs "$temp/src"
    (
        trap 'umount "$temp/src"' EXIT
        debootstrap --variant=minbase --include="$(IFS=, && echo "${NODE_PACKAGES[*]},${GUEST_PACKAGES[*]}")" \
            "$(codename "$debian")" "$temp/src" "$(mirror)" >"$CACHE/vm/debootstrap.log" 2>&1 ||
            die "debootstrap failed, see $CACHE/vm/debootstrap.log"
        say "packages are installed"
        configure_guest "$temp/src"
        cp "$temp/src"/boot/vmlinuz-* "$temp/bin/vmlinuz"
        cp "$temp/src"/boot/initrd.img-* "$temp/bin/initrd"
        make_disk "$temp/src" "$temp/bin/disk" 8G
    )
}

configure_guest() { # ROOT
    local root=$1
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    echo reprise >"$root/etc/hostname"
    printf '127.0.0.1 localhost\n127.0.1.1 reprise\n' >"$root/etc/hosts"
    : >"$root/etc/machine-id"
    cat >"$root/etc/fstab" <<END
/dev/vda / ext4 rw,noatime 0 1
LABEL=payload /payload ext4 ro,noatime 0 0
END
    mkdir "$root/payload"
    # Nothing is reached from there: no route but to the machine that it runs on.
    cat >"$root/etc/systemd/network/eth0.network" <<END
[Match]
Name=eth0
[Network]
Address=10.0.2.15/24
LinkLocalAddressing=no
END
    printf '%s\n' overlay bridge veth br_netfilter >"$root/etc/modules-load.d/reprise.conf"
    # The journal must tell of the boot that crashed.
    mkdir -p "$root/var/log/journal" "$root/etc/systemd/journald.conf.d"
    printf '[Journal]\nStorage=persistent\nSyncIntervalSec=5s\n' >"$root/etc/systemd/journald.conf.d/reprise.conf"
    # The repository may be in /tmp.
    ln -s /dev/null "$root/etc/tmpfiles.d/tmp.conf"
    ln -s /dev/null "$root/etc/systemd/system/tmp.mount"
    install -d -m 700 "$root/root/.ssh"
    install -m 600 "$CACHE/vm/key.pub" "$root/root/.ssh/authorized_keys"
    chroot "$root" systemctl --quiet enable systemd-networkd
    # What runs by itself would be in the way of measurements; etcd is the node's.
    chroot "$root" systemctl --quiet mask etcd apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
        e2scrub_all.timer fstrim.timer systemd-networkd-wait-online.service
}

make_disk() { # ROOT FILE SIZE [LABEL]
    truncate --size "$3" "$2"
    mkfs.ext4 -q -L "${4:-root}" -d "$1" "$2"
}

ensure_image() { # DEBIAN
    ensure_packages "${VM_PACKAGES[@]}"
    mkdir -p "$CACHE/vm"
    [[ -e $CACHE/vm/key ]] || ssh-keygen -q -t ed25519 -N '' -C reprise -f "$CACHE/vm/key"
    ensure "$(image_dir "$1")" build_image "$1"
}

# --- a machine

# What it needs of this machine, on a disk of its own: nothing is copied through its slow network.
make_payload() {
    local root=$DIR/payload file
    mkdir -p "$root"/{bin,cache/bin,repo}
    for file in "$(k8s_bin "$K8S")" "$(k8s_bin "$KUBELET")" "$(containerd_bin "$CONTAINERD")" \
        "$(runc_bin "$CONTAINERD")"; do
        [[ -d $file ]] || die "there is no $file: node.sh build --k8s $K8S --kubelet $KUBELET --containerd $CONTAINERD"
        cp -r --no-clobber "$file" "$root/cache/bin/"
    done
    cp -r "$(images_dir)" "$(protos_dir)" "$root/cache/"
    cp -r "$HERE/.."/{hack,deploy,tests,docs,README.md} "$root/repo/"
    # For who installs the chart, and for the scenarios of groups.
    for file in "$(helm_bin)" "$(jobset_bin)"; do
        [[ ! -d $file ]] || cp -r "$file" "$root/cache/bin/"
    done
    for file in "${ADDED[@]}"; do
        strip -o "$root/bin/$(basename "$file")" "$file" 2>/dev/null || cp "$file" "$root/bin/"
    done
    make_disk "$root" "$DIR/payload.img" 4G payload
    rm -rf "$root"
}

free_port() {
    local port
    for port in {20100..20199}; do
        [[ -n $(ss -Hltn "sport = :$port") ]] || grep -qs "^PORT=$port$" "$VMS"/*/settings || {
            echo "$port"
            return
        }
    done
    die "no free port from 20100 to 20199"
}

write_settings() {
    PORT=$(free_port)
    local name
    for name in DEBIAN CPUS MEMORY PORT; do
        printf '%s=%q\n' "$name" "${!name}"
    done >"$DIR/settings"
    printf 'REACHED=(%s)\n' "${REACHED[*]}" >>"$DIR/settings"
}

up() {
    mkdir -p "$VMS"
    mkdir -m 700 "$DIR" 2>/dev/null || die "machine '$VM' is there already (vm.sh down $VM)"
    with_lock "$CACHE/lock/vms" write_settings
    # shellcheck source=/dev/null
    source "$DIR/settings"
    say "machine $VM: Debian $DEBIAN, $CPUS processors, $MEMORY"
    make_payload
    qemu-img create -q -f qcow2 -F raw -b "$(image_dir "$DEBIAN")/disk" "$DIR/disk.qcow2"
    power_on
    await_answer ''
    configure
}

# The only thing that is the machine's own: where things are. The repository is where it is here, because the scenarios
# look for it there.
configure() {
    ssh_to "mkdir -p '$(dirname "$(realpath "$HERE/..")")' && ln -sfn /payload/repo '$(realpath "$HERE/..")'
        printf '%s\n' REPRISE_CACHE=/payload/cache REPRISE_NODES=/var/lib/reprise-nodes REPRISE_PATIENCE=6 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
            >/etc/environment"
    leave # a connection keeps the environment that it began with
}

power_on() {
    local image port reached=''
    image=$(image_dir "$DEBIAN")
    # Each connection has a process; the other way there is takes one connection in all.
    for port in "${REACHED[@]}"; do
        reached+=",guestfwd=tcp:$OUTSIDE:$port-cmd:busybox nc 127.0.0.1 $port"
    done
    ! is_alive qemu || die "machine $VM runs already"
    mkdir -p "$DIR/run"
    # With the time-stamp counter, which Linux would find unreliable here, asking for the time costs no system call; any
    # other clock takes half of the processors. Page tables of five levels take longer to walk.
    setsid nice -n 10 qemu-system-x86_64 -accel tcg,thread=multi,tb-size=1024 -cpu max,la57=off,pku=off -smp "$CPUS" -m "$MEMORY" \
        -kernel "$image/vmlinuz" -initrd "$image/initrd" \
        -append 'root=/dev/vda rw console=ttyS0 quiet mitigations=off tsc=reliable ipv6.disable=1 net.ifnames=0' \
        -drive "file=$DIR/disk.qcow2,if=virtio,format=qcow2,cache=unsafe" \
        -drive "file=$DIR/payload.img,if=virtio,format=raw,readonly=on" \
        -netdev "user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:$PORT-:22$reached" -device virtio-net-pci,netdev=net \
        -device virtio-rng-pci -display none -serial "file:$DIR/console.log" -monitor none \
        </dev/null >>"$DIR/qemu.log" 2>&1 &
    echo "$! $(born $!)" >"$DIR/run/qemu.pid"
}

power_off() {
    local pid
    leave
    is_alive qemu || return 0
    read -r pid _ <"$DIR/run/qemu.pid"
    kill -KILL "$pid"
    wait_for 30 "end of the machine" is_dead qemu
}

# One connection for all: an emulated machine takes a second to make one.
ssh_to() { # COMMAND...
    ssh -q -F none -i "$CACHE/vm/key" -p "$PORT" -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
        -o ConnectTimeout=30 -o ServerAliveInterval=10 -o ServerAliveCountMax=6 \
        -o ControlMaster=auto -o ControlPersist=yes -o ControlPath="$DIR/ssh" root@127.0.0.1 "$@"
}

# Ends that connection, which otherwise is noticed to be dead after a minute.
leave() {
    [[ ! -S $DIR/ssh ]] || ssh -q -F none -o ControlPath="$DIR/ssh" -O exit root@127.0.0.1 2>/dev/null || true
    rm -f "$DIR/ssh"
}

boot_id() { ssh_to cat /proc/sys/kernel/random/boot_id 2>/dev/null; }

await_answer() { # BOOT_ID_BEFORE
    local before=$1 began=$SECONDS now
    until now=$(boot_id) && [[ -n $now && $now != "$before" ]]; do
        is_alive qemu || die "the machine has ended: see $DIR/qemu.log and $DIR/console.log"
        ((SECONDS - began < 600)) || die "the machine does not answer: see $DIR/console.log"
        leave
        sleep 1
    done
    say "machine $VM answers after $((SECONDS - began)) s"
}

reboot() {
    local before
    before=$(boot_id) || die "machine $VM does not answer"
    ssh_to systemctl reboot || true
    leave
    await_answer "$before"
}

down() {
    [[ -d $DIR ]] || {
        say "there is no machine '$VM'"
        return
    }
    power_off
    rm -rf "$DIR"
    rmdir "$VMS" 2>/dev/null || true
    say "machine $VM is gone"
}

list() {
    local settings
    for settings in "$VMS"/*/settings; do
        [[ -e $settings ]] || continue
        use_existing_vm "$(basename "$(dirname "$settings")")"
        echo "$VM debian=$DEBIAN cpus=$CPUS memory=$MEMORY port=$PORT $(is_alive qemu && echo up || echo down)"
    done
}

main() {
    local command=${1:-help}
    shift || true
    case $command in
    help | -h | --help) usage && return ;;
    build | list) ;;
    up | ssh | reboot | crash | start | down) (($#)) || die "$command needs the name of a machine" ;;
    *) usage >&2 && die "unknown command '$command'" ;;
    esac
    ((EUID == 0)) || die "$command must be root: it makes disks, and debootstrap installs packages"
    case $command in
    list) list ;;
    build)
        parse_options "$@"
        ensure_image "$DEBIAN"
        ;;
    up)
        use_vm "$1"
        parse_options "${@:2}"
        ensure_image "$DEBIAN"
        up
        ;;
    down)
        use_vm "$1"
        down
        ;;
    *)
        use_existing_vm "$1"
        case $command in
        ssh) ssh_to "${@:2}" ;;
        reboot) reboot ;;
        crash) power_off ;;
        start)
            power_on
            await_answer ''
            ;;
        esac
        ;;
    esac
}

# As in node.sh.
main "$@"; exit
