"""The job behind `mgpu train`: digits on several towers, timed, saved, and checked without mgpu."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import mgpu
from mgpu.data.split import part_bounds

MIN_TEST_ACCURACY = 0.97


class TrainingFailure(Exception):
    """The job ran, and its result is not good enough."""


class Digits(NamedTuple):
    """Images (B, 8, 8, 1) float32 in [0, 1] and labels (B,) int64, in three sets."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_data(seed: int = 0) -> Digits:
    """Return the 1797 digits that scikit-learn ships: 1257 to train on, 180 to validate, 360 to test."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    x = (digits.images[order, ..., np.newaxis] / 16.0).astype("float32")
    y = digits.target[order]
    return Digits(x[540:], y[540:], x[360:540], y[360:540], x[:360], y[:360])


def build_model() -> keras.Model:
    """Return a plain, uncompiled Keras model: two convolutions and one dense layer, about 60,000 weights."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(40, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )


class StepTimes(keras.callbacks.Callback):
    """Seconds from the end of one training step to the end of the next, without the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_s: list[float] = []
        self._warm = False
        self._last_s: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start a new run of steps."""
        self._last_s = None  # the pause for validation is not a step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time since the step before."""
        now_s = time.perf_counter()
        if self._warm and self._last_s is not None:
            self.steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the warm-up."""
        self._warm = True  # the first epoch traces the functions and fills the caches


def choose_devices(towers: int) -> list[str]:
    """Return one device per tower: GPUs where there are enough, else logical CPU devices. Says which."""
    gpus = mgpu.get_available_gpus()
    if len(gpus) >= towers:
        print(f"Training on {towers} of {len(gpus)} GPUs.")
        return gpus[:towers]
    devices = mgpu.set_logical_cpu_devices(towers)
    print(
        f"Training on {towers} logical CPU device{'s' * (towers > 1)}, for want of GPUs "
        f"({len(gpus)} here, {towers} asked for). "
        "They share the processor's cores, so this shows what mgpu does, not how fast GPUs are."
    )
    return devices


def run(*, towers: int, epochs: int, batch_size: int, staging_depth: int, output: Path, seed: int) -> None:
    """Train, evaluate, save, load back, and print what happened.

    Args:
        towers: devices to train on.
        epochs: passes over the 1257 training rows.
        batch_size: rows of one step, over all towers.
        staging_depth: batches kept ready on the devices; 0 turns staging off.
        output: folder for digits.keras; made if missing.
        seed: of the weights, the order of the data and dropout.

    Raises:
        TrainingFailure: the test accuracy is below 97 %, or the saved model predicts otherwise.
    """
    devices = choose_devices(towers)
    keras.utils.set_random_seed(seed)
    data = load_data()

    model = build_model()
    model = mgpu.make_parallel(model, gpus=devices, staging_depth=staging_depth)
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    times = StepTimes()
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(data.x_val, data.y_val),
        callbacks=[times],
        verbose=1 if sys.stdout.isatty() else 2,
    )
    described = model.describe()  # evaluate and predict stage other things than fit does
    loss, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=batch_size, verbose=0)
    path = save_and_check(model, data.x_test, output)

    print_report(described, times.steps_s, len(data.x_train), batch_size)
    print(f"Test accuracy {accuracy:.2%} (loss {loss:.4f}) on {len(data.x_test)} rows the model never saw.")
    print(f"Saved {path}: a plain Keras model, loaded back without mgpu, with the same predictions.")
    if accuracy < MIN_TEST_ACCURACY:
        raise TrainingFailure(
            f"The test accuracy is {accuracy:.2%} after {epochs} epochs; at least {MIN_TEST_ACCURACY:.0%} is "
            "expected. Too few epochs are the usual cause: pass --epochs 16 or more."
        )


def save_and_check(model: keras.Model, x: np.ndarray, output: Path) -> Path:
    """Save `model` as digits.keras in `output`, and compare its predictions on `x` with the loaded file's.

    Returns:
        The file's path.

    Raises:
        TrainingFailure: the predictions differ by more than rounding.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "digits.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    # Towers see other batch shapes than one device does, and sums are then added in another order: a few
    # units of 1e-7 on probabilities.
    apart = float(np.max(np.abs(model.predict(x, verbose=0) - plain.predict(x, verbose=0))))
    if apart > 1e-5:
        raise TrainingFailure(
            f"The model loaded from {path} predicts otherwise than the one that was saved: "
            f"probabilities differ by up to {apart:.2g}. This is a fault of mgpu; please report it."
        )
    return path


def print_report(described: dict[str, Any], steps_s: list[float], rows: int, batch_size: int) -> None:
    """Print a table: speed, how each batch was divided, and what was staged where.

    Args:
        described: what `describe()` of the parallel model returned after training.
        steps_s: seconds per step, warm-up left out; may be empty.
        rows: rows in the training set.
        batch_size: rows in every batch but the last.
    """
    towers = described["towers"]
    table = Table(show_header=False, title="What mgpu did", title_justify="left")
    if steps_s:
        # All of an epoch's batches were timed but its first, and the last is smaller.
        timed_rows = (rows - batch_size) / (-(-rows // batch_size) - 1)
        table.add_row("speed", f"{timed_rows / statistics.fmean(steps_s):,.0f} rows/s")
        table.add_row("time per step", f"{1000 * statistics.median(steps_s):.1f} ms (median of {len(steps_s)})")
    else:
        table.add_row("speed", "not measured: the first epoch is warm-up, and there was no other")
    table.add_row("strategy", f"{described['strategy']}, variables on {', '.join(described['variables_on'])}")
    table.add_row("towers", ", ".join(towers))
    table.add_row(f"a batch of {min(batch_size, rows)}", divided(min(batch_size, rows), len(towers)))
    if rows > batch_size and rows % batch_size:
        table.add_row(f"the last batch, {rows % batch_size}", divided(rows % batch_size, len(towers)))
    depth = described["staging_depth"]
    row_bytes = described["staged_bytes_per_row"]
    if depth and row_bytes is not None:
        staged = f"{depth} batch{'es' * (depth > 1)} of {row_bytes * min(batch_size, rows):,} bytes"
        table.add_row("staged ahead", f"{staged}, each part on its tower")
    else:
        table.add_row("staged ahead", "nothing (--staging-depth 0)")
    Console().print(table)


def divided(rows: int, towers: int) -> str:
    """Return how `rows` rows are cut, such as "32 + 32 rows"."""
    return " + ".join(str(stop - start) for start, stop in part_bounds(rows, towers)) + " rows"
