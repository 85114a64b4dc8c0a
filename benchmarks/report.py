"""The one form of results: command, hardware, versions, commit, date, aims, tables with spread."""

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import BUSY_STATUS, refuse_when_busy

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts under a header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Aim:
    """What was aimed at, and what was found."""

    text: str
    found: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        return (self.at_least is None or self.found >= self.at_least) and (
            self.at_most is None or self.found <= self.at_most
        )


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--allow-busy", action="store_true", help="time a busy machine; unreliable")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/<name>-<date>.md")
    return parser


def facts(argv: Sequence[str], module: str) -> dict[str, str]:
    """Return what a reader must know to judge a number or to measure it again."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "horovod"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    num_cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "Command": f"`python -m {module} {shlex.join(argv)}`".replace(" `", "`"),
        "Hardware": f"{_cpu_model()}, {num_cores} cores, {memory_gib:.0f} GiB memory, no GPU used",
        "System": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "Versions": ", ".join(versions),
        "Commit": _commit(),
        "Date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU unknown")


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--", "mgpu", "benchmarks/*.py")
    return f"{commit}, with uncommitted changes" if changed else commit


def render(
    title: str,
    *,
    known: dict[str, str],
    tables: Sequence[Table],
    aims: Sequence[Aim] = (),
    unreliable: Sequence[str] = (),
) -> str:
    """Return the results as Markdown."""
    lines = [f"# {title}", ""]
    for reason in unreliable:
        lines += [f"**UNRELIABLE**: {reason}.", ""]
    lines += [f"* {name}: {value}" for name, value in known.items()]
    if aims:
        tables = [
            Table(
                "Aims",
                ("aim", "found", "met"),
                [(a.text, f"{a.found:.3f}", "yes" if a.is_met else "**no**") for a in aims],
            ),
            *tables,
        ]
    for table in tables:
        lines += ["", f"## {table.title}", "", _row(table.header), _row(["---"] * len(table.header))]
        lines += [_row(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def path_of(name: str, today: datetime.date) -> Path:
    """Return where the results of benchmark `name` of a day are kept."""
    return RESULTS / f"{name}-{today.isoformat()}.md"


def finish(
    name: str,
    title: str,
    *,
    options: argparse.Namespace,
    known: dict[str, str],
    tables: Sequence[Table],
    aims: Sequence[Aim],
    busy: str | None,
) -> None:
    """Look once more whether the machine is quiet, print the results, and write them if asked to.

    Results of a busy machine are printed with a label and never written.

    Raises:
        SystemExit: with `BUSY_STATUS`, the machine became busy, and that is not allowed.
    """
    after = refuse_when_busy(allow_busy=True, when="after the run")
    unreliable = [reason for reason in (busy, after) if reason]
    text = render(title, known=known, tables=tables, aims=aims, unreliable=unreliable)
    print(text)
    if options.write and unreliable:
        print("Not written: the machine was busy. Stop what else runs and do it again.", file=sys.stderr)
    elif options.write:
        RESULTS.mkdir(exist_ok=True)
        path = path_of(name, datetime.datetime.now(datetime.timezone.utc).date())
        path.write_text(text)
        print(f"Written: {path.relative_to(ROOT)}")
    if unreliable and not options.allow_busy:
        raise SystemExit(BUSY_STATUS)
