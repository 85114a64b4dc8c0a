#!/bin/bash
# Brings up a Slurm of two hosts, h1 and h2, on this machine, as root and without systemd; and takes it down.
#
#   hosts.sh up FOLDER      then SLURM_CONF=FOLDER/slurm.conf sbatch ..., and FOLDER/rsh is a remote shell for mpirun
#   hosts.sh down FOLDER
#
# A host is a network namespace with its own address, host name and /dev/shm; the file system is shared.
# Status 77: this machine does not let us make such hosts.
set -euo pipefail

what=$1 dir=$(realpath -m "$2")
# Names and addresses of this run only, so that two runs can be at the same time.
number=$((RANDOM % 200 + 20))
[ -f "$dir/number" ] && number=$(cat "$dir/number")
bridge=mgpu$number net=10.77.$number

on_host() { # HOST COMMAND...
    local host=$1
    shift
    nsenter -t "$(cat "$dir/$host.holder")" -n -u -m -- "$@"
}

make_host() { # NUMBER
    local host=h$1 space=mgpu$number-h$1
    mkdir -p "/etc/netns/$space"
    {
        echo "127.0.0.1 localhost"
        echo "$net.11 h1"
        echo "$net.12 h2"
        echo "$net.1 $(hostname)"
    } >"/etc/netns/$space/hosts"
    ip netns add "$space"
    ip link add "m${number}v$1" type veth peer name eth0 netns "$space"
    ip link set "m${number}v$1" master "$bridge" up
    ip -n "$space" addr add "$net.1$1/24" dev eth0
    ip -n "$space" link set lo up
    ip -n "$space" link set eth0 up
    ip netns exec "$space" unshare --uts --mount sh -c \
        "hostname $host; mount -t tmpfs tmpfs /dev/shm; echo \$\$ >$dir/$host.holder; exec sleep infinity" \
        >/dev/null 2>&1 </dev/null &
    local try
    for try in $(seq 100); do
        if [ -s "$dir/$host.holder" ]; then return; fi
        sleep 0.02
    done
    echo "host $host does not start after $try tries" >&2
    return 1
}

write_files() {
    # shellcheck disable=SC2016 # to be expanded when it runs
    printf '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done; h=$1; shift\nexec nsenter -t "$(cat %s/"$h".holder)" -n -u -m -- /bin/sh -c "$*"\n' "$dir" >"$dir/rsh"
    chmod +x "$dir/rsh"
    cat >"$dir/slurm.conf" <<END
ClusterName=mgpu
SlurmctldHost=$(hostname)($net.1)
SlurmctldPort=$((20000 + 2 * number))
SlurmdPort=$((20001 + 2 * number))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
TmpFS=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName=h1 NodeAddr=$net.11 CPUs=4 RealMemory=4000
NodeName=h2 NodeAddr=$net.12 CPUs=4 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    echo 'CgroupPlugin=cgroup/v1' >"$dir/cgroup.conf"
    head -c 128 /dev/urandom >"$dir/munge.key"
    chmod 600 "$dir/munge.key"
}

up() {
    mkdir -p "$dir"/{state,log,munge,spool.h1,spool.h2}
    echo "$number" >"$dir/number"
    if ! ip link add "$bridge" type bridge; then
        echo "this machine does not let root make network interfaces (CAP_NET_ADMIN), so there are no two hosts" >&2
        exit 77
    fi
    ip addr add "$net.1/24" dev "$bridge"
    ip link set "$bridge" up
    make_host 1
    make_host 2
    write_files
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge/munge.socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -c
    on_host h1 slurmd
    on_host h2 slurmd
    local try
    for try in $(seq 150); do
        if [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = 2 ]; then return; fi
        sleep 0.1
    done
    echo "after $try looks the hosts are not idle: $(sinfo -N -l 2>&1)" >&2
    return 1
}

down() {
    local file host try
    local pids=()
    for file in "$dir"/slurmd.h1.pid "$dir"/slurmd.h2.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
        if [ -s "$file" ]; then pids+=("$(cat "$file")"); fi
    done
    for file in "${pids[@]}"; do kill "$file" 2>/dev/null || true; done
    for try in $(seq 50); do
        if ! kill -0 "${pids[@]}" 2>/dev/null; then break; fi
        sleep 0.05
    done
    [ "$try" -lt 50 ] || kill -9 "${pids[@]}" 2>/dev/null || true
    for host in h1 h2; do
        if [ -s "$dir/$host.holder" ]; then kill "$(cat "$dir/$host.holder")" 2>/dev/null || true; fi
        ip netns del "mgpu$number-$host" 2>/dev/null || true
        rm -rf "/etc/netns/mgpu$number-$host"
    done
    ip link del "$bridge" 2>/dev/null || true
}

case $what in
    up | down) "$what" ;;
    *) echo "hosts.sh: $what is neither up nor down" >&2; exit 2 ;;
esac
