"""The options of `mgpu run`; the work is done in `mgpu.cluster.mpi` and `mgpu.cluster.job`."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from mgpu.errors import LaunchError, MgpuError

# Passed on to ranks on other hosts; those on this one have them anyway. CUDA_VISIBLE_DEVICES is each host's own.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_PASSED_ON_PREFIXES = ("TF_", "KERAS_", "MGPU_", "HOROVOD_", "NCCL_", "XLA_", "OMP_")
# Threads that run TensorFlow's operations. Some wait for another, as a rank's for the other ranks, so a rank with one
# core has several too.
_MIN_INTEROP = 4


@click.command(
    short_help="Start a script on several ranks by mpirun.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-np", "-n", "num_ranks", type=click.IntRange(min=1), required=True, help="Ranks (processes) in all.")
@click.option("-m", "is_module", is_flag=True, help="Take SCRIPT for the name of a module, as python -m does.")
@click.option("--hosts", metavar="LIST", help="Hosts, such as h1:2,h2:2 or node[01-04].  [default: this one]")
@click.option("--per-host", type=click.IntRange(min=1), help="Ranks on each host.  [default: fill one after the other]")
@click.option("--devices", metavar="IDS", help="CUDA_VISIBLE_DEVICES of each host, such as 0,1.")
@click.option(
    "--bind",
    type=click.Choice(["none", "core", "socket"]),
    default="none",
    show_default=True,
    help="Bind each rank to nothing, to its share of the cores, or to a socket.",
)
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Set for all ranks; may be repeated.")
@click.option("--rsh", metavar="PROGRAM", help="Starts things on other hosts.  [default: ssh]")
@click.option("--mpirun", metavar="PATH", help="Use this mpirun.  [default: the first that fits mpi4py]")
@click.option("--mpirun-args", metavar="TEXT", default="", help="Further arguments of mpirun, in one text.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for rank-0.log, rank-1.log, ...  [default: mgpu-logs/<date-time>]",
)
@click.option("--all-output", is_flag=True, help="Show all ranks' output, each line led by [rank]; else rank 0's only.")
@click.option("--dry-run", is_flag=True, help="Print the mpirun command on one line, and start nothing.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|mgpu [ARGS]...")
def run(
    num_ranks: int,
    is_module: bool,
    hosts: str | None,
    per_host: int | None,
    devices: str | None,
    bind: str,
    variables: tuple[str, ...],
    rsh: str | None,
    mpirun: str | None,
    mpirun_args: str,
    logs: Path | None,
    all_output: bool,
    dry_run: bool,
    target: tuple[str, ...],
) -> None:
    r"""Start SCRIPT on several ranks, with this Python, by the mpirun that fits its mpi4py.

    SCRIPT is a file, or mgpu and one of its commands:

    \b
      mgpu run -np 4 train.py --epochs 10
      mgpu run -np 2 -m package.train
      mgpu run -np 2 -- mgpu train --epochs 2

    Where ranks share a host, each is given its share of the cores by OMP_NUM_THREADS,
    TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS (at least 4), each only if it is not set.

    The exit status is 0 only if every rank's is; 128 + N if signal N ended a rank or this command.
    The traceback of the rank that failed first is printed last.
    """
    try:
        status = _run(
            program=_program(is_module, target),
            num_ranks=num_ranks,
            hosts=hosts,
            per_host=per_host,
            bind=bind,
            variables=_variables(variables, devices),
            rsh=rsh,
            mpirun=mpirun,
            extra=tuple(shlex.split(mpirun_args)),
            logs=logs,
            show="all" if all_output else "first",
            dry_run=dry_run,
        )
    except MgpuError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(status)


def _run(
    *,
    program: list[str],
    num_ranks: int,
    hosts: str | None,
    per_host: int | None,
    bind: str,
    variables: dict[str, str],
    rsh: str | None,
    mpirun: str | None,
    extra: tuple[str, ...],
    logs: Path | None,
    show: str,
    dry_run: bool,
) -> int:
    from mgpu.cluster.environment import launch_of
    from mgpu.cluster.hosts import with_slots
    from mgpu.cluster.job import Job
    from mgpu.cluster.mpi import Options, find_mpirun, mpirun_command, num_cores
    from mgpu.cluster.watch import FAILURES

    environ = os.environ
    launch = launch_of(environ)
    if launch.size > 1:
        raise LaunchError(
            f"mgpu run -np {num_ranks} starts ranks; this process is itself rank {launch.rank} of {launch.size}, "
            f"started by {launch.launcher} ({launch.variable}={launch.size}). Use one of the two: start the script by "
            f"{launch.launcher}, or mgpu run once, without it."
        )
    found = find_mpirun(environ, mpirun=mpirun)
    listed = tuple(with_slots(hosts)) if hosts is not None else ()
    num_hosts = len(listed) or int(environ.get("SLURM_JOB_NUM_NODES", "1"))

    def options(environment: Mapping[str, str | None]) -> Options:
        return Options(
            num_ranks=num_ranks,
            hosts=listed,
            ranks_per_host=per_host,
            num_hosts=num_hosts,
            cores_per_host=num_cores(),
            bind=bind,
            environment=environment,
            root=os.geteuid() == 0,
            remote_shell=rsh,
            extra=extra,
        )

    plain = options({})
    ours = _threads(plain.threads) if plain.most_on_a_host > 1 else {}
    if found.kind != "Open MPI":
        # Its ranks write to a pipe, not to a terminal of their own: Python would keep what they say until it is much.
        ours["PYTHONUNBUFFERED"] = "1"
    settings: dict[str, str | None] = {**{k: v for k, v in ours.items() if k not in environ}, **variables}
    if num_hosts > 1:
        settings = {**_passed_on(environ), **settings}
    if dry_run:
        click.echo(shlex.join(mpirun_command(found, options(settings), program)))
        return 0
    folder = _folder(logs)
    failures = folder / "failures"
    failures.mkdir(exist_ok=True)
    for old in failures.glob("*-rank*.txt"):
        old.unlink()
    if num_hosts > 1:
        settings = {**settings, FAILURES: None}
    command = mpirun_command(found, options(settings), program)
    click.echo(f"mgpu run: {num_ranks} ranks by {found} ({found.path}); logs in {folder}", err=True)
    job = Job(command, found, num_ranks=num_ranks, logs=folder, failures=failures, show=show)
    ended = job.run({**environ, FAILURES: str(failures.resolve())})
    if ended.status:
        click.echo(f"mgpu run: status {ended.status}: {ended.cause}. Logs of all ranks: {folder}", err=True)
        if ended.traceback:
            click.echo(ended.traceback.rstrip("\n"), err=True)
    return ended.status


def _program(is_module: bool, target: tuple[str, ...]) -> list[str]:
    """Return what each rank runs."""
    if not target:
        raise click.UsageError("Nothing to run was given. Name a script: mgpu run -np 2 train.py")
    name, *arguments = target
    if is_module:
        return [sys.executable, "-m", *target]
    if name == "mgpu":
        return [sys.executable, "-m", "mgpu.cli.main", *arguments]
    if Path(name).exists():
        return [sys.executable, name, *arguments]
    raise LaunchError(
        f"mgpu run was asked to start {name!r}, which is no file in {Path.cwd()}, nor mgpu. Options of mgpu run come "
        "before the script, those of the script after it; a slip in the name is the other usual cause. "
        "As in: mgpu run -np 2 train.py --epochs 10"
    )


def _variables(given: tuple[str, ...], devices: str | None) -> dict[str, str]:
    """Return the variables that were asked for with their values."""
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise click.UsageError(f"--env {name} passes on a variable that is not set. Give a value: --env {name}=...")
        variables[name] = value if equals else os.environ[name]
    return variables


def _threads(cores: int) -> dict[str, str]:
    """Return the variables that keep a rank to `cores` cores."""
    interop = max(_MIN_INTEROP, cores)
    return {"OMP_NUM_THREADS": f"{cores}", "TF_NUM_INTRAOP_THREADS": f"{cores}", "TF_NUM_INTEROP_THREADS": f"{interop}"}


def _passed_on(environ: Mapping[str, str]) -> dict[str, str | None]:
    names = (name for name in sorted(environ) if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))
    return dict.fromkeys(names)


def _folder(logs: Path | None) -> Path:
    """Make and return the folder for the logs: `logs`, or a new one named by date and time."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        return logs
    stem = Path("mgpu-logs") / time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise LaunchError(f"1000 jobs logged to {stem} within a second. Give each a folder: mgpu run --logs FOLDER ...")
