"""Decides how the rate of steps, and the time of the first one, are measured on towers of one process.

    python -m benchmarks.towers --write                # rows per second, 7 minutes
    python -m benchmarks.towers --first-step --write   # `fit` to the end of its first step, 8 minutes

Logical CPU devices stand in for GPUs, so more towers can't be faster: what shows is what the towers cost.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import report
from benchmarks.report import Aim, Table
from benchmarks.timing import ratios, refuse_when_busy, spread, take_turns

CANDIDATES = (("plain", 1), ("mirrored", 1), ("mgpu", 1), ("mirrored", 2), ("mgpu", 2))
# Seconds for each workload, building and tracing included.
BUDGETS_S = {"mlp": 55, "cnn": 75, "resnet50": 240}
TITLES = {"plain": "plain Keras", "mirrored": "MirroredStrategy", "mgpu": "mgpu"}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--first-step", action="store_true", help="time the start of training, not its rate")
    parser.add_argument("--workloads", nargs="+", choices=list(BUDGETS_S), default=list(BUDGETS_S))
    parser.add_argument("--rounds", type=int, default=15, help="most rounds of each workload (rates)")
    parser.add_argument("--steps", type=int, help="steps of an epoch, for a quick look (rates)")
    parser.add_argument("--towers", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers to try (first step)")
    parser.add_argument("--repeats", type=int, default=3, help="most repeats (first step)")
    parser.add_argument("--budget-s", type=float, default=420, help="no repeat starts that would pass it (first step)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="TensorFlow's, of each kind")
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "TOWERS"), help=argparse.SUPPRESS)
    parser.add_argument("--rates-child", metavar="WORKLOAD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rates_child:
        _rates_child(options)
        return
    if options.child:
        _first_step_child(options.child[0], int(options.child[1]), options.threads)
        return
    busy = refuse_when_busy(allow_busy=options.allow_busy)
    known = report.facts(sys.argv[1:], "benchmarks.towers")
    known["Threads"] = f"{options.threads} intra-op and {options.threads} inter-op for every candidate"
    if options.first_step:
        name, title, (tables, aims) = "first-step", "First step", _first_steps(options, known)
    else:
        name, title, (tables, aims) = "towers", "Rows per second by number of towers", _rates(options, known)
    report.finish(name, title, options=options, known=known, tables=tables, aims=aims, busy=busy)


# ---- rates


def _rates(options: argparse.Namespace, known: dict[str, str]) -> tuple[list[Table], list[Aim]]:
    known["Method"] = (
        "`fit` on arrays in memory, two epochs at a time, the second one timed; a model's candidates take turns in one "
        "process that has 2 logical CPU devices; the first round is dropped; median (quartiles) over rounds "
        "of the rates and of the ratios within a round"
    )
    tables, aims = [], []
    for key in options.workloads:
        # A process for each: the collectives of two models under MirroredStrategy(2 CPUs) collide in one process.
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.towers", "--rates-child", key]
        command += ["--threads", str(options.threads), "--rounds", str(options.rounds)]
        command += ["--steps", str(options.steps)] if options.steps else []
        done = subprocess.run(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rates = {(library, towers): of_rounds for library, towers, of_rounds in found["rates"]}
        tables.append(_rate_table(found["title"], rates))
        aims += _rate_aims(key, rates)
        print(f"{key}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    return tables, aims


def _rates_child(options: argparse.Namespace) -> None:
    from benchmarks.workloads import WORKLOADS, compiled_model, set_up_devices

    start_s = time.perf_counter()
    key = options.rates_child
    workload = WORKLOADS[key]
    if options.steps:
        workload = dataclasses.replace(workload, steps_per_epoch=options.steps)
    set_up_devices(2, options.threads)
    x, y = workload.data()
    candidates: dict[tuple[str, int], Callable[[], float]] = {
        (library, towers): functools.partial(_rate_of, compiled_model(workload, library, towers), workload, x, y)
        for library, towers in CANDIDATES
    }
    left_s = BUDGETS_S[key] - (time.perf_counter() - start_s)
    rates = take_turns(candidates, num_rounds=options.rounds, budget_s=left_s)
    title = f"{workload.name}, {workload.steps_per_epoch} steps an epoch"
    print(json.dumps({"title": title, "rates": [[*name, of_rounds] for name, of_rounds in rates.items()]}))


def _rate_of(model, workload, x, y) -> float:
    """Return the rows per second of an epoch, after one that is not timed."""
    from benchmarks.workloads import EpochTimes

    times = EpochTimes()
    history = model.fit(x, y, batch_size=workload.batch_size, epochs=2, verbose=0, callbacks=[times])
    if not math.isfinite(history.history["loss"][-1]):
        raise SystemExit(f"{workload.name}: the loss is {history.history['loss']}; these numbers mean nothing.")
    return workload.num_rows / times.epochs_s[-1]


def _rate_table(title: str, rates: dict[tuple[str, int], list[float]]) -> Table:
    rows = []
    for (library, towers), of_rounds in rates.items():
        row = [TITLES[library], str(towers), spread(of_rounds).text(0)]
        row.append(spread(ratios(of_rounds, rates["plain", 1])).text())
        peer = rates.get(("mirrored", towers))
        row.append("" if library != "mgpu" else spread(ratios(of_rounds, peer)).text())
        rows.append(row)
    title = f"{title}, {len(rates['plain', 1])} rounds"
    return Table(title, ("", "towers", "rows/s", "x plain", "x MirroredStrategy, as many towers"), rows)


def _rate_aims(key: str, rates: dict[tuple[str, int], list[float]]) -> list[Aim]:
    def ratio(ours: tuple[str, int], theirs: tuple[str, int]) -> float:
        return spread(ratios(rates[ours], rates[theirs])).median

    aims = [
        Aim(f"{key}: 1 tower at least 0.98 of plain", ratio(("mgpu", 1), ("plain", 1)), at_least=0.98),
        Aim(f"{key}: 2 towers at least 0.95 of plain", ratio(("mgpu", 2), ("plain", 1)), at_least=0.95),
    ]
    wanted = {"mlp": 3.0, "cnn": 1.2}.get(key)
    if wanted:
        text = f"{key}: 2 towers at least {wanted:g} times MirroredStrategy"
        aims.append(Aim(text, ratio(("mgpu", 2), ("mirrored", 2)), at_least=wanted))
    return aims


# ---- the first step


def _first_steps(options: argparse.Namespace, known: dict[str, str]) -> tuple[list[Table], list[Aim]]:
    known["Method"] = (
        "ResNet50 64x64, batch 16; each measurement in a fresh process; from the call of `fit` to the end "
        "of its first step; making and compiling the model before it is timed apart; median (quartiles) over "
        "repeats"
    )
    builds_s: dict[tuple[str, int], list[float]] = {}

    def child(library: str, towers: int) -> float:
        command = [sys.executable, "-m", "benchmarks.towers", "--child", library, str(towers)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, check=True)
        seconds = json.loads(done.stdout.splitlines()[-1])
        print(f"{library} {towers}: {seconds}", file=sys.stderr)
        builds_s.setdefault((library, towers), []).append(seconds["build_s"])
        return seconds["first_step_s"]

    candidates = {
        (library, towers): functools.partial(child, library, towers)
        for towers in options.towers
        for library in ("mgpu", "mirrored")
    }
    found = take_turns(candidates, num_rounds=options.repeats, budget_s=options.budget_s, least_rounds=1, warm_up=False)
    rows = []
    for (library, towers), of_rounds in found.items():
        row = [
            TITLES[library],
            str(towers),
            spread(of_rounds).text(),
            spread(builds_s[library, towers]).text(),
        ]
        row.append(spread(ratios(of_rounds, found[library, options.towers[0]])).text())
        row.append("" if library != "mgpu" else spread(ratios(of_rounds, found["mirrored", towers])).text())
        rows.append(row)
    fewest, most = options.towers[0], options.towers[-1]
    header = ("", "towers", "first step, s", "making and compiling, s", f"x {fewest}", "x MirroredStrategy")
    table = Table(f"ResNet50 64x64, batch 16, {len(found['mgpu', most])} repeats", header, rows)
    aims = [
        Aim(
            f"{most} towers at most 2 times as long as {fewest}",
            spread(ratios(found["mgpu", most], found["mgpu", fewest])).median,
            at_most=2.0,
        ),
        Aim(
            f"{most} towers at most 1/4 of MirroredStrategy's {most}",
            spread(ratios(found["mgpu", most], found["mirrored", most])).median,
            at_most=0.25,
        ),
    ]
    return [table], aims


def _first_step_child(library: str, towers: int, num_threads: int) -> None:
    from benchmarks.workloads import WORKLOADS, FirstStep, compiled_model, set_up_devices

    workload = WORKLOADS["resnet50"]
    set_up_devices(towers, num_threads)
    x, y = workload.data(2 * workload.batch_size)
    start_s = time.perf_counter()
    model = compiled_model(workload, library, towers)
    built_s = time.perf_counter()
    first = FirstStep()
    model.fit(x, y, batch_size=workload.batch_size, epochs=1, verbose=0, callbacks=[first])
    print(
        json.dumps(
            {"build_s": round(built_s - start_s, 3), "first_step_s": round(first.ended_s - built_s, 3)},
        )
    )


if __name__ == "__main__":
    main()
