"""The options of `mgpu horovod install`; the work is done in `mgpu.cluster.horovod_build`."""

import os
from pathlib import Path

import click

from mgpu.errors import MgpuError

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


@click.group(short_help="Install Horovod, compiled for this TensorFlow.")
def horovod() -> None:
    """Install Horovod, compiled for the TensorFlow and the MPI that are here."""


@horovod.command(short_help="Compile Horovod, or take it from the cache, and install it.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of finished builds.  [default: ~/.cache/mgpu/horovod]",
)
@click.option("--nccl", is_flag=True, help="Build for GPUs with NCCL. Untried.")
@click.option("--force", is_flag=True, help="Build again, even if the cache has it.")
@click.option("--dry-run", is_flag=True, help="Show the checks, the cache's key and the commands; run none.")
def install(cache: Path | None, nccl: bool, force: bool, dry_run: bool) -> None:
    """Compile Horovod from its source archive and install it into this Python's environment.

    Looks first for a C++ compiler, CMake, MPI with headers, TensorFlow and pip, and names all that
    is missing with the command that mends it. A finished build is kept and used again for the same
    versions of TensorFlow, Python, MPI and compiler.
    """
    from mgpu.cluster.horovod_build import Installer, Options, refusal

    def say(line: str) -> None:
        click.echo(f"mgpu: {line}")

    installer = Installer(Options(cache=cache, nccl=nccl, force=force), os.environ, say)
    for finding in installer.findings:
        remedy = f"  ({finding.remedy})" if finding.state == "warn" else ""
        click.echo(f"{_MARKS[finding.state]} {finding.name:13} {finding.found}{remedy}")
    if nccl:
        say("--nccl: a build with NCCL is untried; please report how it goes")
    if dry_run:
        message = refusal(installer.findings)
        if message:
            raise click.ClickException(message)
        kept = installer.wheel()
        click.echo(f"cache: {installer.folder} ({'has ' + kept.name if kept else 'empty'})")
        for line in installer.plan():
            click.echo(f"$ {line}")
        return
    try:
        report = installer.install()
    except MgpuError as error:
        raise click.ClickException(str(error)) from error
    built = [name.upper() for name in ("mpi", "gloo", "nccl") if report[name]]
    say(f"Horovod {report['version']} works with TensorFlow {report['tensorflow']}; it has {', '.join(built)}")
