"""How fast training runs: rows a second, time of a step and its spread, and what of it was waiting for input."""

import sys
import time
from typing import Any

import keras
import numpy as np

from mgpu.cluster.world import is_chief, world
from mgpu.errors import ModelError


class Throughput(keras.callbacks.Callback):
    """Measure the speed of training, with the same figures on all ranks.

    A step is timed from the end of the one before to its own end, on the host: the wait for input and what other
    callbacks do in between are in it, validation and the ends of epochs are not. With `steps_per_execution` above 1
    the steps of one execution count as equally long. Costs one exchange of the step times an epoch.

    Args:
        warmup_steps: of each fit() that are left out, 0 or more: in the first ones functions are traced and staging
            areas filled.
        verbose: whether rank 0 prints a line an epoch.

    Attributes:
        epochs: of the last fit(), a dict as of `summary` for each epoch.

    Raises:
        ModelError: the model is not one of mgpu.make_parallel(), which counts rows and waits; or `warmup_steps` is
            negative.

    Example:
        >>> import keras, mgpu
        >>> speed = mgpu.callbacks.Throughput(warmup_steps=5)
        >>> speed.summary()["steps"]
        0
    """

    needs_all_ranks = True

    def __init__(self, warmup_steps: int = 10, *, verbose: bool = True) -> None:
        super().__init__()
        if warmup_steps < 0:
            raise ModelError(
                f"Throughput(warmup_steps={warmup_steps}): {warmup_steps} steps cannot be left out. To measure from "
                "the first step on: Throughput(warmup_steps=0)"
            )
        self._warmup_steps = warmup_steps
        self._verbose = verbose
        self._start()

    def _start(self) -> None:
        self.epochs: list[dict] = []
        self._total = _Tally(1, 1)
        self._steps_seen = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        meter = getattr(getattr(self.model, "_mgpu", None), "meter", None)
        if meter is None:
            name = type(self.model).__name__
            raise ModelError(
                f"Throughput was passed to fit() of the model {self.model.name!r}, a plain {name}. Rows and waits for "
                "input are counted by models of mgpu.make_parallel(); one device is enough: "
                "model = mgpu.make_parallel(model, gpus=1)"
            )
        self._start()
        self._towers = len(self.model.towers)
        self._total = _Tally(world().size, self._towers)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._measured: dict[str, Any] = {"times_s": [], "rows": 0, "wait_s": 0.0}
        self._mark()

    def _mark(self) -> None:
        meter = self.model._mgpu.meter
        self._last = (time.perf_counter(), int(meter.steps), int(meter.rows), float(meter.input_wait_s))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        time_s, steps, rows, wait_s = self._last
        meter = self.model._mgpu.meter
        made = int(meter.steps) - steps
        if not made:
            return  # its time is part of the next step
        self._mark()
        self._steps_seen += made
        if self._steps_seen - made >= self._warmup_steps:
            measured = self._measured
            measured["times_s"] += [(self._last[0] - time_s) / made] * made
            measured["rows"] += self._last[2] - rows
            measured["wait_s"] += self._last[3] - wait_s

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        measured = {**self._measured, "times_s": np.asarray(self._measured["times_s"], np.float32)}
        ranks = world().gather(measured, "the figures of mgpu.callbacks.Throughput")
        tally = _Tally(len(ranks), self._towers)
        for part in (tally, self._total):
            part.add(ranks)
        self.epochs.append(tally.figures())
        if self._verbose and is_chief():
            sys.stdout.write(f"mgpu: epoch {epoch + 1}: {_line(self.epochs[-1])}\n")

    def summary(self) -> dict[str, float]:
        """Return the figures of the last fit(), without its warm-up, the same on every rank.

        Returns:
            `rows_per_s` of all devices, `rows_per_s_per_device`; `step_time_median_s`, and its quartiles
            `step_time_q1_s` and `step_time_q3_s`, over the steps of all ranks; `input_wait_share`, 0 to 1, the part of
            the ranks' time spent waiting for their sources, and `input_wait_share_max` of the rank that waited most;
            `rows` and `steps` measured, `ranks`, `devices`. Rates, times and shares are NaN when no step was measured.
        """
        return self._total.figures()


class _Tally:
    """Sums of what all ranks measured, and the figures that follow from them."""

    def __init__(self, ranks: int, towers: int) -> None:
        self._ranks, self._devices = ranks, ranks * towers
        self._times_s: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        self._rows = 0
        self._wait_s = np.zeros(ranks)

    def add(self, measured: list[dict]) -> None:
        for rank, part in enumerate(measured):
            self._times_s[rank].append(part["times_s"])
            self._wait_s[rank] += part["wait_s"]
        # Each rank counts the rows of all; the largest is of one whose last step is in.
        self._rows += max(part["rows"] for part in measured)

    def figures(self) -> dict[str, float]:
        times_s = [np.concatenate([np.zeros(0, np.float32), *parts]) for parts in self._times_s]
        spent_s = np.array([part.sum(dtype=np.float64) for part in times_s])
        pooled_s = np.concatenate(times_s)
        some = pooled_s.size > 0 and spent_s.min() > 0
        q1_s, median_s, q3_s = np.percentile(pooled_s, [25, 50, 75]) if some else [np.nan] * 3
        rate = self._rows / spent_s.max() if some else np.nan
        shares = self._wait_s / spent_s if some else np.array([np.nan])
        return {
            "rows_per_s": float(rate),
            "rows_per_s_per_device": float(rate / self._devices),
            "step_time_median_s": float(median_s),
            "step_time_q1_s": float(q1_s),
            "step_time_q3_s": float(q3_s),
            "input_wait_share": float(self._wait_s.sum() / spent_s.sum()) if some else np.nan,
            "input_wait_share_max": float(shares.max()),
            "rows": self._rows,
            "steps": max(part.size for part in times_s),
            "ranks": self._ranks,
            "devices": self._devices,
        }


def _line(figures: dict[str, float]) -> str:
    if not figures["steps"]:
        return "no step measured, all were warm-up"
    return (
        f"{figures['rows_per_s']:.1f} rows/s on {figures['devices']} devices, "
        f"{figures['rows_per_s_per_device']:.1f} each; step {1e3 * figures['step_time_median_s']:.2f} ms (quartiles "
        f"{1e3 * figures['step_time_q1_s']:.2f} to {1e3 * figures['step_time_q3_s']:.2f}), "
        f"{100 * figures['input_wait_share']:.1f} % of it waiting for input"
    )
