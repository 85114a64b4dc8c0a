"""Installs Horovod: its source archive, with one line taken out, compiled for the TensorFlow and MPI that are here.

Nothing is loaded into this process: TensorFlow and Horovod run in child processes only, so that a build for another
TensorFlow can be replaced.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mgpu.cluster.findings import Finding
from mgpu.cluster.toolchain import MIN_CMAKE, Toolchain, inspect, install_command, search_path
from mgpu.errors import LaunchError

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
COMMAND = "mgpu horovod install"
# A part of the cache's key: counted up when the settings below change what is built.
_RECIPE = 1
_SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    # Horovod's files are written for CMake 3.13; CMake 4 refuses those that ask for less than 3.5.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}
# Where a machine keeps its CUDA; other HOROVOD_ variables would change what is built behind the cache's back.
_KEPT = ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")
# Modules that Horovod's setup.py needs in the build, and the packages that bring them.
_BUILD_MODULES = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging"}
# XLA's operations include headers that TensorFlow's wheels no longer have (highwayhash, farmhash).
_XLA_SOURCE = re.compile(r"^.*xla_mpi_ops\.cc.*\n", re.MULTILINE)
_CMAKE_FILE = Path("horovod", "tensorflow", "CMakeLists.txt")
_SHOWN_LINES = 30
# While a step runs, the user hears of it this often.
_PROGRESS_S = 20.0
# What the makefiles of CMake print before each file, behind what pip puts before it.
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)
# Variables of a launcher: a child that started MPI with them would take itself for a rank of the job.
_LAUNCHER = re.compile(r"^(OMPI_|PMI_|PMI[X2]|PRTE_|HYDRA_|MPI_LOCAL|SLURM_|MGPU_WORLD_PID)")
_VERIFY = """
import json, sys
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.constant([1.0, 2.0, 3.0]), op=hvd.Sum)
print("mgpu:" + json.dumps({
    "version": __import__("horovod").__version__,
    "tensorflow": tf.__version__,
    "mpi": bool(hvd.mpi_built()),
    "gloo": bool(hvd.gloo_built()),
    "nccl": bool(hvd.nccl_built()),
    "size": hvd.size(),
    "sum": total.numpy().tolist(),
}))
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to install.

    Attributes:
        cache: folder of finished wheels; None for `default_cache()`.
        nccl: build for GPUs with NCCL. Untried.
        force: build even where the cache has the wheel.
    """

    cache: Path | None = None
    nccl: bool = False
    force: bool = False


def missing_message() -> str:
    """Return what to tell somebody whose strategy needs Horovod and who has none."""
    return (
        "The strategy 'horovod' needs Horovod with its TensorFlow operations, which cannot be imported here. It has "
        "to be compiled for the installed TensorFlow and MPI, once, in about three minutes on two cores. "
        f"Run: {COMMAND}    (strategy='mpi' needs only mpi4py, and nothing to compile.)"
    )


def default_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of finished wheels: mgpu/horovod in XDG_CACHE_HOME, or else in ~/.cache."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return home / "mgpu" / "horovod"


def cache_key(tools: Toolchain, *, nccl: bool) -> str:
    """Return the name of the cache's folder for a build with `tools`: readable, and different where a part differs."""
    parts = key_parts(tools, nccl=nccl)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return f"tf{tools.tensorflow.split()[-1]}-{'-'.join(tools.python.split('-')[:2])}-{digest}"


def key_parts(tools: Toolchain, *, nccl: bool) -> dict[str, Any]:
    """Return all that two builds must have in common to be the same."""
    parts = dataclasses.asdict(tools)
    del parts["cmake"]  # it writes the makefiles; nothing of it is in the result
    return {**parts, "horovod": VERSION, "nccl": nccl, "recipe": _RECIPE}


def without_xla(text: str) -> str:
    """Return Horovod's CMakeLists.txt for TensorFlow, without the line that adds xla_mpi_ops.cc.

    Raises:
        LaunchError: there is not exactly one such line, so that this is not the file this was written for.
    """
    changed, count = _XLA_SOURCE.subn("", text)
    if count != 1:
        raise LaunchError(
            f"{COMMAND} takes the one line that adds xla_mpi_ops.cc out of {_CMAKE_FILE}; this file has {count} such "
            f"lines. It is probably not of Horovod {VERSION}. Remove {ARCHIVE} from the cache (default: "
            f"~/.cache/mgpu/horovod), then run: {COMMAND} --force"
        )
    return changed


def refusal(findings: Sequence[Finding]) -> str:
    """Return the message that names all that is missing, each with its remedy; "" if nothing is."""
    failed = [finding for finding in findings if finding.state == "fail"]
    if not failed:
        return ""
    width = max(len(finding.name) for finding in failed)
    lines = [f"{COMMAND} compiles Horovod {VERSION}, and this is missing for it:"]
    for finding in failed:
        lines += [f"  {finding.name:{width}}  {finding.found}", f"  {'':{width}}    {finding.remedy}"]
    together = install_command([finding.name for finding in failed])
    if together:
        lines.append(f"All packages at once:  {together}")
    lines.append(f"Then run it again:  {COMMAND}")
    return "\n".join(lines)


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a child that starts MPI as a job of one, whatever job this process is part of."""
    kept = {name: value for name, value in environ.items() if not _LAUNCHER.match(name)}
    # Open MPI refuses root unless told twice; a check of one process is none of the accidents this is against.
    return {**kept, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def build_environment(environ: Mapping[str, str], *, tools: Path, cmake: str | None, nccl: bool) -> dict[str, str]:
    """Return the environment of the build.

    Args:
        environ: the caller's.
        tools: folder of the modules that the build needs and the environment lacks.
        cmake: the CMake to use.
        nccl: see `Options`.
    """
    kept = {n: v for n, v in environ.items() if not n.startswith("HOROVOD_") or n in _KEPT}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    built = {
        **kept,
        **_SETTINGS,
        "PATH": search_path(environ),
        "MAKEFLAGS": f"-j{cores}",
        # Before the user's own: a module is here only if the environment has none.
        "PYTHONPATH": os.pathsep.join([str(tools), *filter(None, [environ.get("PYTHONPATH")])]),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if cmake:
        built["HOROVOD_CMAKE"] = cmake
    if nccl:
        built["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return built


def commands(folder: Path, wheel: Path) -> dict[str, list[str]]:
    """Return the commands of an installation, by what they do.

    Args:
        folder: of the build; "source" in it holds the unpacked archive.
        wheel: the finished wheel.
    """
    pip = [sys.executable, "-m", "pip"]
    from_source = ["--no-deps", "--no-build-isolation"]
    source = str(folder / "source" / f"horovod-{VERSION}")
    archive = ["--dest", str(folder / "download"), f"horovod=={VERSION}"]
    return {
        "tools": [*pip, "install", "--target", str(folder / "tools"), "--upgrade"],
        "download": [*pip, "download", *from_source, "--no-binary", ":all:", *archive],
        "build": [*pip, "wheel", "-v", "--use-pep517", *from_source, "--wheel-dir", str(folder / "wheel"), source],
        # Twice: the first replaces a build of the same version, the second adds the packages it needs.
        "install": [*pip, "install", "--no-deps", "--force-reinstall", str(wheel)],
        "needs": [*pip, "install", str(wheel)],
    }


class Installer:
    """Builds Horovod, or takes it from the cache, and installs it into this Python's environment.

    Args:
        options: see `Options`.
        environ: the environment, for PATH, XDG_CACHE_HOME and the like.
        say: is called with each line that tells the user how far it is.
    """

    def __init__(self, options: Options, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.options = options
        self.environ = environ
        self.say = say
        self.cache = (options.cache or default_cache(environ)).absolute()
        self.findings, self.tools = inspect(environ, nccl=options.nccl)
        self.folder = self.cache / cache_key(self.tools, nccl=options.nccl) if self.tools.tensorflow else self.cache
        self.log = self.folder / "build.log"

    def wheel(self) -> Path | None:
        """Return the finished wheel of this key in the cache, or None."""
        return next(iter(sorted(self.folder.glob("horovod-*.whl"))), None)

    def plan(self) -> list[str]:
        """Return what `install` would run, one shell line each."""
        wheel = None if self.options.force else self.wheel()
        steps = commands(Path("BUILD"), wheel or self.folder / "horovod.whl")
        if wheel:
            return [shlex.join(steps[name]) for name in ("install", "needs")]
        built = build_environment({}, tools=Path("BUILD/tools"), cmake=None, nccl=self.options.nccl)
        named = [f"{n}={v}" for n, v in built.items() if n.startswith(("HOROVOD", "CMAKE", "MAKE"))]
        needed = self._needed()
        return [
            *([shlex.join([*steps["tools"], *needed])] if needed else []),
            shlex.join(steps["download"]),
            f"tar -xzf BUILD/download/{ARCHIVE} -C BUILD/source",
            f"sed -i /xla_mpi_ops.cc/d BUILD/source/horovod-{VERSION}/{_CMAKE_FILE}",
            shlex.join(["env", *named, *steps["build"]]),
            *(shlex.join(steps[name]) for name in ("install", "needs")),
        ]

    def install(self) -> dict[str, Any]:
        """Install, and return what a child process finds that works: see `verify`.

        Raises:
            LaunchError: something is missing, or a step fails; the message names the remedy, and the log.
        """
        message = refusal(self.findings)
        if message:
            raise LaunchError(message)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"{COMMAND} keeps what it builds in {self.cache}, which cannot be written: {error}. "
                f"Name another folder: {COMMAND} --cache DIR"
            ) from error
        with self._lock():
            wheel = self.wheel()
            if wheel is None or self.options.force:
                wheel = self._build()
            else:
                self.say(f"taking {wheel.name} from {self.folder}")
            steps = commands(Path(), wheel)
            for name in ("install", "needs"):
                self._run(steps[name], {**self.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}, name)
        self.say("checking it in a process of its own")
        return verify(self.environ, nccl=self.options.nccl)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self.folder / "lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.say(f"waiting for another {COMMAND}, which holds {file.name}")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _needed(self) -> list[str]:
        needed = [package for module, package in _BUILD_MODULES.items() if not _has_module(module)]
        return needed + ([] if self.tools.cmake else [f"cmake>={MIN_CMAKE[0]}.{MIN_CMAKE[1]}"])

    def _build(self) -> Path:
        self.log.write_text("", encoding="utf-8")
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mgpu-horovod-") as name:
            folder = Path(name)
            for part in ("tools", "download", "source", "wheel"):
                (folder / part).mkdir()
            steps = commands(folder, Path())
            cmake = self.tools.cmake or str(folder / "tools" / "cmake" / "data" / "bin" / "cmake")
            env = build_environment(self.environ, tools=folder / "tools", cmake=cmake, nccl=self.options.nccl)
            needed = self._needed()
            if needed:
                self.say(f"fetching {', '.join(needed)} for this build only")
                self._run([*steps["tools"], *needed], env, "fetching the tools of the build")
            _unpack(self._archive(steps["download"], env, folder / "download"), folder / "source")
            file = folder / "source" / f"horovod-{VERSION}" / _CMAKE_FILE
            file.write_text(without_xla(file.read_text(encoding="utf-8")), encoding="utf-8")
            self.say(f"compiling (about three minutes on two cores); the compiler writes to {self.log}")
            self._run(steps["build"], env, "compiling Horovod")
            (built,) = (folder / "wheel").glob("horovod-*.whl")
            wheel = _put(built, self.folder)
        parts = key_parts(self.tools, nccl=self.options.nccl)
        (self.folder / "build.json").write_text(json.dumps(parts, indent=2) + "\n", encoding="utf-8")
        self.say(f"built {wheel.name} in {time.monotonic() - start_s:.0f} s, kept in {self.folder}")
        return wheel

    def _archive(self, download: list[str], env: Mapping[str, str], folder: Path) -> Path:
        """Return the source archive: the cache's, or else downloaded into it; its digest is always checked."""
        kept = self.cache / ARCHIVE
        if not kept.exists():
            self.say(f"downloading {ARCHIVE}")
            self._run(
                download, env, f"downloading {ARCHIVE} (without network, put this file into {self.cache} by hand)"
            )
            _check_digest(folder / ARCHIVE)
            _put(folder / ARCHIVE, self.cache)
        _check_digest(kept)
        return kept

    def _run(self, command: list[str], env: Mapping[str, str], what: str) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            status = self._wait(command, env, log, what)
        if status != 0:
            raise LaunchError(failure(what, command, status, self.log))

    def _wait(self, command: list[str], env: Mapping[str, str], log: IO[str], what: str) -> int:
        """Run `command`, say every `_PROGRESS_S` how far it is, and return its exit status."""
        start_s = time.monotonic()
        with subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                while True:
                    try:
                        return process.wait(_PROGRESS_S)
                    except subprocess.TimeoutExpired:
                        done = progress(self.log.read_text(encoding="utf-8", errors="replace"))
                        self.say(f"  {what}: {done}{time.monotonic() - start_s:.0f} s")
            except BaseException:  # as by Ctrl-C, and as subprocess.run does
                process.kill()
                raise


def progress(log: str) -> str:
    """Return the share of the files that are compiled, as "45 %, ", or "" before the first one."""
    shares = _PERCENT.findall(log)
    return f"{shares[-1]} %, " if shares else ""


def failure(what: str, command: Sequence[str], status: int, log: Path) -> str:
    """Return the message that a step of the build failed: first errors and last lines of its log, and its path."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"\berror:|CMake Error|Killed", line)][:5]
    killed = any("Killed" in line or "internal compiler error" in line for line in errors)
    cause = (
        "The compiler was killed, as happens without enough memory: taskset -c 0 mgpu horovod install --force runs "
        "one at a time."
        if killed
        else f"After a change, or to see whether it passes on a second try, run: {COMMAND} --force"
    )
    first = ["First errors:", *errors] if errors else []
    return "\n".join(
        [
            f"{COMMAND}: {what} failed with exit status {status}: {shlex.join(command)}",
            *first,
            f"Last {_SHOWN_LINES} lines of {log}:",
            *lines[-_SHOWN_LINES:],
            f"The whole log: {log}. {cause}",
        ]
    )


def verify(environ: Mapping[str, str], *, nccl: bool = False) -> dict[str, Any]:
    """Start Horovod in a child process and let it add up, and return what it says of itself.

    Returns:
        "version", "tensorflow" (of the child), "mpi", "gloo", "nccl" (whether built), "size", "sum".

    Raises:
        LaunchError: it does not start, has no MPI (or NCCL, if asked for), or adds up wrong.
    """
    done = subprocess.run(
        [sys.executable, "-c", _VERIFY],
        env=child_environment(environ),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("mgpu:")]
    if done.returncode != 0 or not said:
        tail = "\n".join((done.stderr + done.stdout).splitlines()[-_SHOWN_LINES:])
        raise LaunchError(
            f"Horovod {VERSION} is installed, and a process that starts it ends with exit status {done.returncode}:\n"
            f"{tail}\nThe MPI that it was built with is probably not the one found at run time, or TensorFlow was "
            f"replaced since. Build it again: {COMMAND} --force"
        )
    report: dict[str, Any] = json.loads(said[-1].removeprefix("mgpu:"))
    lacking = [name for name in ("mpi", *(["nccl"] if nccl else [])) if not report[name]]
    if lacking or report["sum"] != [1.0, 2.0, 3.0] or report["size"] != 1:
        raise LaunchError(
            f"Horovod {VERSION} was to have {' and '.join(lacking) or 'a sum of [1, 2, 3] over one rank'}; it reports "
            f"{report}. Another build of it is probably found first on sys.path. Remove it and build again: "
            f"{sys.executable} -m pip uninstall -y horovod && {COMMAND} --force"
        )
    return report


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_digest(archive: Path) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != ARCHIVE_SHA256:
        raise LaunchError(
            f"{COMMAND} builds {ARCHIVE} with sha256 {ARCHIVE_SHA256}; {archive} has {found}. It is damaged, or not "
            f"the file that was published. Remove it and run again: rm {archive} && {COMMAND}"
        )


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        # The digest is checked, so what is in it is known; "data" is refused by Pythons before 3.10.12.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)


def _put(file: Path, folder: Path) -> Path:
    """Copy `file` into `folder` so that it is there whole or not at all, and return its new path."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{file.name}.")
    os.close(handle)
    shutil.copyfile(file, name)
    os.chmod(name, 0o644)
    os.replace(name, folder / file.name)
    return folder / file.name
