#!/usr/bin/env bash
# Starts a script on several ranks by Open MPI's mpirun (4 or 5). Copy it, and set the variables for your machines.
#
#   launch/mpirun.sh [--np N] [--hosts LIST] [--per-host N] [--devices IDS] [--dry-run] train.py [ARGS]...
#
# `mgpu run` does the same and more: it checks that mpirun fits mpi4py, knows MPICH too, and keeps a log of each rank.
set -euo pipefail

NP=${NP:-2}                        # ranks in all
HOSTS=${HOSTS:-}                   # such as h1:2,h2:2 (ranks each takes); empty: this one, or the batch system's
PER_HOST=${PER_HOST:-}             # ranks on each host; empty: fill one after the other
DEVICES=${DEVICES:-}               # CUDA_VISIBLE_DEVICES of each host, such as 0,1; each rank takes its own of them
BIND=${BIND:-none}                 # none; core: each rank to THREADS cores; socket
THREADS=${THREADS:-}               # cores that each rank may use; empty: its share
CORES=${CORES:-$(env -u OMP_NUM_THREADS nproc)} # cores of each host
ENVIRONMENT=${ENVIRONMENT:-}       # further variables to pass on, such as "NCCL_DEBUG=INFO MY_DATA"
RSH=${RSH:-}                       # program that starts things on other hosts; empty: ssh
PYTHON=${PYTHON:-python3}
MPIRUN=${MPIRUN:-mpirun}

dry_run=
while [ $# -gt 0 ]; do
    case $1 in
        --np) NP=$2; shift 2 ;;
        --hosts) HOSTS=$2; shift 2 ;;
        --per-host) PER_HOST=$2; shift 2 ;;
        --devices) DEVICES=$2; shift 2 ;;
        --dry-run) dry_run=1; shift ;;
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "mpirun.sh: unknown option $1; there are --np, --hosts, --per-host, --devices and --dry-run" >&2; exit 2 ;;
        *) break ;;
    esac
done
if [ $# = 0 ]; then echo "mpirun.sh: no script was named. As in: $0 --np 2 train.py" >&2; exit 2; fi

version=$("$MPIRUN" --version 2>&1 | sed -n 's/^.*(Open MPI) \([0-9]*\).*/\1/p' | head -n 1) || true
if [ -z "$version" ]; then
    echo "mpirun.sh: $MPIRUN is missing, or not Open MPI's. Set MPIRUN to one, or use: mgpu run -np $NP $*" >&2
    exit 1
fi
# Open MPI 5's launcher has settings of its own, and another name for the remote shell.
mca=--mca agent=plm_rsh_agent
if [ "$version" -ge 5 ]; then mca=--prtemca agent=plm_ssh_agent; fi

num_hosts=${SLURM_JOB_NUM_NODES:-1}
if [ -n "$HOSTS" ]; then commas=${HOSTS//[^,]/}; num_hosts=$((${#commas} + 1)); fi
here=${PER_HOST:-$(((NP + num_hosts - 1) / num_hosts))} # ranks of a host
if [ -z "$THREADS" ]; then THREADS=$((CORES / here)); fi
if [ "$THREADS" -lt 1 ]; then THREADS=1; fi
if [ "$here" -gt "$CORES" ]; then BIND=none; fi

command=("$MPIRUN" -np "$NP")
if [ -n "$HOSTS" ]; then command+=(--host "$HOSTS"); fi

by=slot
if [ -n "$PER_HOST" ]; then by=ppr:$PER_HOST:node; fi
if [ "$BIND" = core ] && [ "$THREADS" -gt 1 ]; then by+=:PE=$THREADS; fi
if [ "$here" -gt "$CORES" ] && [ "$version" -ge 5 ]; then by+=:OVERSUBSCRIBE; fi
# Without --bind-to, Open MPI gives each of two ranks one core, whatever the number of threads.
command+=(--map-by "$by" --bind-to "$BIND")
if [ "$here" -gt "$CORES" ] && [ "$version" -lt 5 ]; then command+=(--oversubscribe); fi
if [ "$(id -u)" = 0 ]; then command+=(--allow-run-as-root); fi
command+=(--tag-output)

# A rank that waits looks without pause, on a core that TensorFlow needs unless there is one to spare for each rank.
if [ $((2 * here)) -gt "$CORES" ]; then command+=(--mca mpi_yield_when_idle 1); fi
# A host that is cut off counts as dead after 5 + 3 * 2 s; without this, mpirun waits for ever.
if [ "$num_hosts" -gt 1 ]; then
    command+=("$mca" oob_tcp_keepalive_time 5 "$mca" oob_tcp_keepalive_intvl 2 "$mca" oob_tcp_keepalive_probes 3)
fi
if [ -n "$RSH" ]; then command+=("$mca" "$agent" "$RSH"); fi

# What the ranks of other hosts should see too.
if [ "$num_hosts" -gt 1 ]; then
    for name in $(compgen -e | sort); do
        case $name in
            PATH | LD_LIBRARY_PATH | PYTHONPATH | TF_* | KERAS_* | MGPU_* | HOROVOD_* | NCCL_* | XLA_* | OMP_*)
                command+=(-x "$name") ;;
        esac
    done
fi
set_unless_set() { if [ -z "${!1+set}" ]; then command+=(-x "$1=$2"); fi; }
if [ "$here" -gt 1 ]; then
    set_unless_set OMP_NUM_THREADS "$THREADS"
    set_unless_set TF_NUM_INTRAOP_THREADS "$THREADS"
    set_unless_set TF_NUM_INTEROP_THREADS $((THREADS > 4 ? THREADS : 4)) # some wait for others, so never only one
fi
if [ -n "$DEVICES" ]; then command+=(-x "CUDA_VISIBLE_DEVICES=$DEVICES"); fi
for setting in $ENVIRONMENT; do command+=(-x "$setting"); done

command+=("$PYTHON" "$@")
if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
