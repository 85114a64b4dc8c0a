"""Gathers what is installed and attached here, for `mgpu.cluster.diagnosis` to judge.

TensorFlow, Keras, Horovod and MPI are loaded in a child process only: one that crashes is then a fact as well.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu.cluster.environment import Launch, launch_of
from mgpu.cluster.horovod_build import child_environment
from mgpu.cluster.toolchain import search_path

# Distribution -> the import name it brings, for those whose versions matter.
PACKAGES = {"tensorflow": "tensorflow", "keras": "keras", "numpy": "numpy", "mpi4py": "mpi4py", "horovod": "horovod"}
# How `mpirun --mca mpi_yield_when_idle 1` reaches a rank.
_YIELD = "OMPI_MCA_mpi_yield_when_idle"
# Each part prints as soon as it knows, so that a crash in a later one leaves the earlier ones.
_PROBE = r"""
import json, sys, traceback
def say(part, value):
    print("mgpu:" + json.dumps([part, value]), flush=True)
def part(function):
    try:
        value = function()
    except BaseException as error:
        value = {"error": "".join(traceback.format_exception_only(type(error), error)).strip()[-600:]}
    say(function.__name__, value)
def tensorflow():
    import tensorflow as tf
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    return {"version": tf.__version__, "gpus": gpus, "cuda": bool(tf.test.is_built_with_cuda())}
def keras():
    import keras
    return {"version": keras.__version__, "backend": keras.backend.backend()}
def mpi():
    import mpi4py
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI
    return {"version": mpi4py.__version__, "library": MPI.Get_library_version().split(",")[0].strip("\0 \n")}
def horovod():
    import importlib.util, pathlib
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        return None
    file = pathlib.Path(spec.submodule_search_locations[0], "metadata.json")
    against = json.loads(file.read_text()).get("tensorflow") if file.exists() else None
    say("horovod", {"error": "the process ends while it is loaded", "against": against})
    try:
        import horovod.tensorflow as hvd
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[-600:], "against": against}
    built = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl")}
    return {"version": __import__("horovod").__version__, "against": against, **built}
def libraries():
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    return sorted(path for path in paths if "/libmpi.so" in path or "/libmpich.so" in path)
for function in (tensorflow, keras, mpi, horovod, libraries):
    part(function)
"""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What one process finds.

    Attributes:
        python, mgpu: versions.
        installed: package -> version, for those of `PACKAGES` that are installed.
        minimum: package -> lowest version that mgpu supports, as its own metadata says.
        tensorflows: installed distributions that bring `tensorflow`.
        probe: part -> what the child process says: "tensorflow", "keras", "mpi", "horovod" and "libraries".
            A part that fails is {"error": text}; Horovod's is None where it is not installed.
        mpirun: path and first line of `mpirun --version`; ("", "") where there is none.
        nvidia_gpus: GPUs that the driver lists.
        visible: CUDA_VISIBLE_DEVICES, or None.
        threads: variables that set numbers of threads, where set.
        yields: whether Open MPI is told to give its core away while it waits.
        cores: processors that this process may run on; `host_cores` are those of the host.
        cpu_limit: processors' worth of time that the container is given, or None.
        shm_bytes: size of /dev/shm, or None where there is none.
        host: name of the host.
        launch: what the launcher says.
    """

    python: str
    mgpu: str
    installed: Mapping[str, str]
    minimum: Mapping[str, str]
    tensorflows: tuple[str, ...]
    probe: Mapping[str, Any]
    mpirun: tuple[str, str]
    nvidia_gpus: int
    visible: str | None
    threads: Mapping[str, str]
    yields: bool
    cores: tuple[int, ...]
    host_cores: int
    cpu_limit: float | None
    shm_bytes: int | None
    host: str
    launch: Launch


def collect(environ: Mapping[str, str]) -> Facts:
    """Gather the facts; takes about ten seconds, most of them for loading TensorFlow in a child process.

    Raises:
        LaunchError: the variables of the launcher contradict each other.
    """
    import mgpu

    path = search_path(environ)
    brings = importlib.metadata.packages_distributions()
    installed = {}
    for package, module in PACKAGES.items():
        names = sorted(brings.get(module, []))
        if names:
            installed[package] = importlib.metadata.version(names[0])
    names_of_threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    return Facts(
        python=platform.python_version(),
        mgpu=mgpu.__version__,
        installed=installed,
        minimum=_minimum(),
        tensorflows=tuple(sorted({name.replace("_", "-") for name in brings.get("tensorflow", [])})),
        probe=_probe(environ),
        mpirun=_mpirun(path),
        nvidia_gpus=_nvidia_gpus(path),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        threads={name: environ[name] for name in names_of_threads if name in environ},
        yields=environ.get(_YIELD, "0").lower() in ("1", "true", "yes", "enabled"),
        cores=_cores(),
        host_cores=os.cpu_count() or 1,
        cpu_limit=_cpu_limit(Path("/sys/fs/cgroup")),
        shm_bytes=_shm_bytes("/dev/shm"),
        host=platform.node(),
        launch=launch_of(environ),
    )


def _minimum() -> dict[str, str]:
    """Return the lower bounds of mgpu's own requirements, whatever distribution brings TensorFlow.

    mpi4py is wanted by an extra only, and is then bounded as well.
    """
    try:
        required = importlib.metadata.requires("mgpu") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    bounds = {}
    for text in required:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\d.]+)", text)
        if match is None:
            continue
        name = match[1].lower()
        if name == "mpi4py" or "extra ==" not in text:
            bounds["tensorflow" if "tensorflow" in name else name] = match[2]
    return bounds


def _probe(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=child_environment(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            check=False,
        )
        out, ended = done.stdout, f"the process ends with status {done.returncode}: {done.stderr.strip()[-600:]}"
    except subprocess.TimeoutExpired as error:
        out = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ended = "the process does not end within 300 s"
    parts: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("mgpu:"):
            part, value = json.loads(line.removeprefix("mgpu:"))
            parts[part] = value
    for part in ("tensorflow", "keras", "mpi", "horovod", "libraries"):
        parts.setdefault(part, {"error": ended})
    return parts


def _mpirun(path: str) -> tuple[str, str]:
    program = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if program is None:
        return "", ""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return program, ""
    # MPICH's Hydra names itself on the first line and its version on the second.
    return program, " ".join(" ".join(done.stdout.split("\n")[:2]).split())


def _nvidia_gpus(path: str) -> int:
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return 0
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpu_limit(cgroup: Path) -> float | None:
    """Return the processors' worth of time that `cgroup` (of version 2) allows, or None if it sets no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _shm_bytes(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
