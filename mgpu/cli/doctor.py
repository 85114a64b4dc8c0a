"""What `mgpu doctor` prints, and its exit status."""

import json
import os
import sys
from collections.abc import Sequence

import click

from mgpu.cluster import diagnosis, facts
from mgpu.cluster.findings import Finding
from mgpu.errors import MgpuError

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}
_ASCII_MARKS = {"ok": "+", "warn": "!", "fail": "x"}
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def lines(findings: Sequence[Finding], encoding: str | None = None) -> list[str]:
    """Return the findings as lines of text, each remedy below its fault.

    Args:
        findings: what to show.
        encoding: of the terminal; one that has no ✓ gets letters.
    """
    try:
        "✓✗".encode(encoding or "utf-8")
        marks = _MARKS
    except (UnicodeEncodeError, LookupError):
        marks = _ASCII_MARKS
    width = max((len(finding.name) for finding in findings), default=0)
    shown = []
    for finding in findings:
        mark = click.style(marks[finding.state], fg=_COLOURS[finding.state])
        shown.append(f"{mark} {finding.name:{width}}  {finding.found}")
        if finding.state != "ok" and finding.remedy:
            shown.append(f"  {'':{width}}    {finding.remedy}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """Return one line that counts the faults."""
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    return f"{len(findings)} checks: {failed} failed, {warned} with a warning"


def run(as_json: bool) -> int:
    """Look, print on rank 0, and return the exit status, the same on all ranks: 1 if a check fails."""
    chief, size = True, 1
    findings: list[Finding] = []
    try:
        found = facts.collect(os.environ)
        findings = diagnosis.examine(found)
        size = found.launch.size
        if size > 1:
            chief = found.launch.rank == 0
            from mgpu.cluster.world import world

            ranks = world()
            findings += diagnosis.compare(ranks, found, findings)
            # The status is that of rank 0, whose findings are all that is shown.
            findings = ranks.broadcast(findings, what="the findings of rank 0")
    except MgpuError as error:
        findings = [*findings, diagnosis.refused(error)]
    if chief:
        _print(findings, size, as_json)
    return int(any(finding.state == "fail" for finding in findings))


def _print(findings: Sequence[Finding], size: int, as_json: bool) -> None:
    if as_json:
        checks = [
            {"name": f.name, "state": f.state, "found": f.found, "remedy": f.remedy if f.state != "ok" else ""}
            for f in findings
        ]
        ok = all(finding.state != "fail" for finding in findings)
        click.echo(json.dumps({"ok": ok, "ranks": size, "checks": checks}, indent=2))
        return
    for line in lines(findings, sys.stdout.encoding):
        click.echo(line)
    click.echo(summary(findings))
