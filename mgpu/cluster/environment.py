"""Decides which rank of how many this process is, from the variables its launcher set.

A launcher inside another hides the outer one: under `mpirun` in a Slurm job the variables of Slurm describe
mpirun's daemons, so those of the MPI are looked at first.
"""

import dataclasses
import re
from collections.abc import Mapping

from mgpu.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
        rank, size: number of the process, 0 to size - 1, and how many there are.
        local_rank, local_size: the same among the processes of one host.
        launcher: who says so: "mpirun (Open MPI)", "mpirun (MPICH)", "srun" or "none".
        variable: the environment variable that told the size, for messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    variable: str = ""


# Launcher, then the variables of rank, size, local rank and local size. The first whose rank and size are set counts.
_LAUNCHERS = (
    (
        "mpirun (Open MPI)",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("mpirun (MPICH)", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")),
)


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Return what the launcher says about a process with the environment `environ`.

    Returns:
        `Launch()` (rank 0 of 1, launcher "none") for a process that no launcher started.

    Raises:
        LaunchError: a variable is not a number, or the rank is not below the size.
    """
    for launcher, names in _LAUNCHERS:
        rank_name, size_name, local_rank_name, local_size_name = names
        if rank_name not in environ or size_name not in environ:
            continue
        in_step = _is_task_of_step(environ)
        if launcher == "srun" and not in_step:
            continue
        if launcher == "mpirun (MPICH)" and local_rank_name not in environ and in_step:
            continue  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, and only Slurm's variables tell the local rank
        rank, size = _number(environ, rank_name), _number(environ, size_name)
        local_rank = _number(environ, local_rank_name, rank)
        local_size = _local_size(environ, local_size_name, size)
        if not (0 <= rank < size and 0 <= local_rank < local_size):
            raise LaunchError(
                f"{launcher} says that this process is rank {rank} of {size}, and {local_rank} of {local_size} on its "
                f"host ({', '.join(f'{n}={environ.get(n)}' for n in names)}): a rank is below the size. The variables "
                "were probably inherited from another job. Start the script in a fresh shell, or unset them: "
                f"unset {' '.join(names)}"
            )
        return Launch(rank, size, local_rank, local_size, launcher, size_name)
    return Launch()


def _is_task_of_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    The shell of a batch job has SLURM_PROCID=0 and perhaps SLURM_NTASKS, and is no rank: only srun sets the variables
    of a step. A batch job submitted from inside a step inherits them; then the number of tasks is mostly another.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    return "SLURM_STEP_ID" in environ and tasks is not None and environ.get("SLURM_NTASKS", tasks) == tasks


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(
            f"The launcher's variable {name}={text!r} is not a number, so the rank of this process is unknown. It was "
            f"probably set by hand. Unset it: unset {name}"
        ) from error


def _local_size(environ: Mapping[str, str], name: str, size: int) -> int:
    text = environ.get(name)
    if text is None:
        return size
    if not name.startswith("SLURM"):
        return _number(environ, name)
    node = _number(environ, "SLURM_NODEID")
    counts = tasks_per_node(text)
    if not 0 <= node < len(counts):
        raise LaunchError(
            f"srun says that this process runs on node {node} of its step (SLURM_NODEID={node}), and how many tasks "
            f"{len(counts)} nodes have ({name}={text}), so the number of ranks on this host is unknown. The variables "
            f"were probably inherited from another job. Start the script in a fresh shell, or unset them: "
            f"unset SLURM_NODEID {name}"
        )
    return counts[node]


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node that Slurm writes as, for example, "2(x3),1".

    Raises:
        LaunchError: the text is not of that form.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise LaunchError(
                f"Slurm's number of tasks per node, {text!r}, cannot be read at {item!r}; it looks like 2(x3),1. "
                "The variable was probably set by hand. Unset it: "
                "unset SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
