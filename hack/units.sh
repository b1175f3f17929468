# Where systemd runs the machine, it runs a node's components as well, also after a reboot. Sourced.
# shellcheck shell=bash

readonly UNITS=/etc/systemd/system

has_systemd() { [[ -d /run/systemd/system ]]; } # as sd_booted(3) has it

unit() { echo "reprise-$NODE-$1.service"; } # COMPONENT

# The kubelet's own name for a cgroup `/reprise-NODE` under systemd: dashes tell a slice's parents.
slice() { echo "reprise_${NODE//-/_}.slice"; }

# A component's unit, as its own project ships it: containers outlive containerd, and what is killed by a scenario is
# started by it.
write_unit() { # COMPONENT
    local more=''
    case $1 in
    containerd | crio | kubelet*) more=$'KillMode=process\nDelegate=yes\nTasksMax=infinity\n' ;;
    esac
    [[ $1 != @(containerd|crio) ]] || more+=$'OOMScoreAdjust=-999\n'
    # A process is named by its id and when it began, see born.
    cat >"$UNITS/$(unit "$1")" <<END
[Unit]
Description=$1 of node $NODE
Requires=$(unit machine)
After=$(unit machine)
StartLimitIntervalSec=0
[Service]
Type=exec
ExecStart=$DIR/run/$1.sh
ExecStartPost=/bin/sh -c 'echo "\$MAINPID \$\$(cut -d " " -f 22 /proc/\$MAINPID/stat)" >$DIR/run/$1.pid'
StandardOutput=append:$DIR/log/$1.log
StandardError=inherit
LimitNOFILE=1048576
${more}[Install]
WantedBy=multi-user.target
END
}

write_units() {
    local component units
    for component in "${COMPONENTS[@]}"; do
        write_unit "$component"
    done
    cat >"$UNITS/$(unit machine)" <<END
[Unit]
Description=What node $NODE takes from the machine
RequiresMountsFor=$HERE $CACHE $DIR
[Service]
Type=oneshot
RemainAfterExit=yes
Environment="HOME=$HOME" "REPRISE_CACHE=$CACHE" "REPRISE_NODES=$NODES"
ExecStart=$HERE/node.sh resume $NODE
END
    # systemd hands a controller down only where it is asked for.
    cat >"$UNITS/$(slice)" <<END
[Slice]
CPUAccounting=yes
IOAccounting=yes
MemoryAccounting=yes
TasksAccounting=yes
AllowedCPUs=$(cat /sys/devices/system/cpu/online)
END
    systemctl daemon-reload
    # Each call has systemd read all units again.
    mapfile -t units < <(for component in etcd apiserver controller-manager "$RUNTIME" kubelet; do unit "$component"; done)
    systemctl --quiet enable "${units[@]}"
}

remove_units() {
    local component units
    mapfile -t units < <(for component in machine "${COMPONENTS[@]}"; do unit "$component"; done)
    systemctl stop "$(slice)" "$(unit machine)" 2>/dev/null || true
    rm -f "${units[@]/#/$UNITS/}" "${units[@]/#/$UNITS/multi-user.target.wants/}" "$UNITS/$(slice)"
    systemctl daemon-reload
    systemctl reset-failed "${units[@]}" 2>/dev/null || true
}
