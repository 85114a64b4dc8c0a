"""Decides how the memory that two towers take beyond the plain model, and its growth, are measured.

    python -m benchmarks.memory --write     # at most 4 minutes

Each measurement is the peak resident size (VmHWM) of a fresh process: imports, data, building and training.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.report import Aim, Table
from benchmarks.timing import ratios, refuse_when_busy, spread, take_turns

MIB = 2**20
NUM_TOWERS = 2
NUM_EPOCHS = 30
SETTLED_EPOCH = 5
STAGING_DEPTH = 1
# MiB of input of a peak, and of the search for growth.
DATA_MIB = {"mlp": 400, "cnn": 20}
GROWTH_DATA_MIB = {"mlp": 10, "cnn": 3}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="most repeats of each peak")
    parser.add_argument(
        "--budget-s", type=float, default=70, help="no repeat starts that would pass it, for each model"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(DATA_MIB), default=list(DATA_MIB))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="TensorFlow's, of each kind")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "WORKLOAD", "LIBRARY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*options.child, num_threads=options.threads)
        return
    busy = refuse_when_busy(allow_busy=options.allow_busy)
    known = report.facts(sys.argv[1:], "benchmarks.memory")
    known["Threads"] = f"{options.threads} intra-op and {options.threads} inter-op for every candidate"
    known["Method"] = (
        f"VmHWM of a fresh process that builds the model and fits two epochs of an array; plain Keras and "
        f"mgpu with {NUM_TOWERS} towers in turn. Growth: VmRSS after each of {NUM_EPOCHS} epochs of one "
        f"`fit` with validation, and the slope of a straight line through epochs {SETTLED_EPOCH} to {NUM_EPOCHS}"
    )
    peaks, growths, aims = [], [], []
    for workload in options.workloads:
        rows, found = _peaks(workload, options)
        peaks += rows
        aims += found
        rows, found = _growths(workload, options)
        growths += rows
        aims += found
    tables = [
        Table("Peak", ("", "model", "input, MiB", "staged, MiB", "peak, MiB", "x plain"), peaks),
        Table(
            "Growth",
            ("", "model", "after epoch 5, MiB", "after epoch 30, MiB", "range, MiB", "slope, KiB/epoch"),
            growths,
        ),
    ]
    report.finish("memory", "Memory", options=options, known=known, tables=tables, aims=aims, busy=busy)


def _run_child(what: str, workload: str, library: str, options: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "benchmarks.memory", "--child", what, workload, library]
    command += ["--threads", str(options.threads)]
    start_s = time.perf_counter()
    done = subprocess.run(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{what} {workload} {library}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _peaks(workload: str, options: argparse.Namespace) -> tuple[list[list[str]], list[Aim]]:
    measured: list[dict] = []

    def peak(library: str) -> float:
        measured.append(_run_child("peak", workload, library, options))
        return measured[-1]["peak_bytes"]

    candidates = {library: functools.partial(peak, library) for library in ("plain", "mgpu")}
    found = take_turns(candidates, num_rounds=options.rounds, budget_s=options.budget_s, least_rounds=1, warm_up=False)
    about = measured[0]
    rows = []
    for library, of_rounds in found.items():
        staged = f"{about['staged_bytes'] / MIB:.2f}" if library == "mgpu" else ""
        name = "plain Keras" if library == "plain" else f"mgpu, {NUM_TOWERS} towers"
        peaks_mib = spread([p / MIB for p in of_rounds])
        rows.append(
            [
                name,
                about["name"],
                f"{about['data_bytes'] / MIB:.0f}",
                staged,
                peaks_mib.text(0),
                spread(ratios(of_rounds, found["plain"])).text(3),
            ]
        )
    allowed = [p + about["staged_bytes"] for p in found["plain"]]
    aim = Aim(
        f"{workload}: peak at most 1.05 of plain plus staged batches",
        spread(ratios(found["mgpu"], allowed)).median,
        at_most=1.05,
    )
    return rows, [aim]


def _growths(workload: str, options: argparse.Namespace) -> tuple[list[list[str]], list[Aim]]:
    rows = []
    growth = {}
    for library in ("plain", "mgpu"):
        about = _run_child("growth", workload, library, options)
        sizes = about["rss_bytes"]
        settled = sizes[SETTLED_EPOCH - 1 :]
        per_epoch = slope(settled)
        growth[library] = per_epoch * len(settled) / settled[0]
        name = "plain Keras" if library == "plain" else f"mgpu, {NUM_TOWERS} towers"
        rows.append(
            [
                name,
                about["name"],
                f"{settled[0] / MIB:.1f}",
                f"{settled[-1] / MIB:.1f}",
                f"{(max(settled) - min(settled)) / MIB:.1f}",
                f"{per_epoch / 1024:+.1f}",
            ]
        )
    text = f"{workload}: mgpu grows by at most 0.01 of its size from epoch {SETTLED_EPOCH} to {NUM_EPOCHS}"
    return rows, [Aim(text, growth["mgpu"], at_most=0.01)]


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through `values` at 0, 1, 2, ..."""
    return statistics.linear_regression(range(len(values)), values).slope


def status_bytes(field: str) -> int:
    """Return VmHWM or VmRSS of this process. Unlike ru_maxrss, VmHWM starts anew with the program."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux.")


def _child(what: str, workload_key: str, library: str, *, num_threads: int) -> None:
    from benchmarks.workloads import WORKLOADS, compiled_model, keras, set_up_devices

    workload = WORKLOADS[workload_key]
    set_up_devices(NUM_TOWERS, num_threads)
    row_bytes = 4
    for size in workload.row_shape:
        row_bytes *= size
    mib = (DATA_MIB if what == "peak" else GROWTH_DATA_MIB)[workload_key]
    num_batches = mib * MIB // (row_bytes * workload.batch_size)
    x, y = workload.data(num_batches * workload.batch_size)
    model = compiled_model(workload, library, NUM_TOWERS)
    batch_bytes = (row_bytes + y.itemsize) * workload.batch_size
    result = {
        "name": workload.name,
        "data_bytes": x.nbytes,
        # While a step works on the oldest batch, it is still in its area.
        "staged_bytes": batch_bytes * (STAGING_DEPTH + 1),
    }
    if what == "peak":
        model.fit(x, y, batch_size=workload.batch_size, epochs=2, verbose=0)
        result["peak_bytes"] = status_bytes("VmHWM")
    else:
        sizes: list[int] = []

        def note(epoch, logs):
            gc.collect()
            sizes.append(status_bytes("VmRSS"))

        model.fit(
            x,
            y,
            batch_size=workload.batch_size,
            epochs=NUM_EPOCHS,
            verbose=0,
            validation_data=(x[: 2 * workload.batch_size], y[: 2 * workload.batch_size]),
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)],
        )
        result["rss_bytes"] = sizes
    print(json.dumps(result))


if __name__ == "__main__":
    main()
