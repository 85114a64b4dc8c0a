"""The models that are timed, their data, and the three ways to train them: plain, MirroredStrategy, mgpu.

Importing this loads TensorFlow.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

import mgpu


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and how much of what it is fed in an epoch."""

    name: str
    model: Callable[[], keras.Model]
    row_shape: tuple[int, ...]
    batch_size: int
    steps_per_epoch: int

    @property
    def num_rows(self) -> int:
        return self.batch_size * self.steps_per_epoch

    def data(self, num_rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return `num_rows` rows (an epoch's, if None) of random float32 and their labels, 0 to 9."""
        rng = np.random.default_rng(0)
        num_rows = num_rows or self.num_rows
        x = rng.random((num_rows, *self.row_shape), dtype=np.float32)
        return x, rng.integers(0, 10, num_rows, dtype=np.int32)


def _mlp() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(512, activation="relu"), layers.Dense(10, activation="softmax")]
    )


def _cnn() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _resnet50() -> keras.Model:
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


WORKLOADS = {
    "mlp": Workload("MLP 784-512-10, batch 128", _mlp, (784,), batch_size=128, steps_per_epoch=150),
    "cnn": Workload("CNN 32x32x3, batch 64", _cnn, (32, 32, 3), batch_size=64, steps_per_epoch=25),
    "resnet50": Workload("ResNet50 64x64, batch 16", _resnet50, (64, 64, 3), batch_size=16, steps_per_epoch=8),
}


def set_up_devices(num_devices: int, num_threads: int) -> None:
    """Divide the CPU into logical devices, with the same threads for every way to train."""
    mgpu.set_logical_cpu_devices(num_devices)
    tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)


def compiled_model(workload: Workload, library: str, num_towers: int) -> keras.Model:
    """Return the model of `workload` for "plain" Keras, "mirrored" (MirroredStrategy) or "mgpu"."""
    keras.utils.set_random_seed(0)
    devices = [f"/CPU:{tower}" for tower in range(num_towers)]
    # jit_compile: without GPU it is what "auto" means, and MirroredStrategy has no other.
    how: dict[str, Any] = {
        "optimizer": "sgd",
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "jit_compile": False,
    }
    if library == "mirrored":
        with tf.distribute.MirroredStrategy(devices).scope():
            model = workload.model()
            model.compile(**how)
        return model
    model = workload.model()
    if library == "mgpu":
        model = mgpu.make_parallel(model, gpus=devices)
    model.compile(**how)
    return model


class EpochTimes(keras.callbacks.Callback):
    """Notes how long each epoch takes, and when the first step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs_s: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs_s.append(time.perf_counter() - self._start_s)


class FirstStep(keras.callbacks.Callback):
    """Notes when the first step of `fit` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_s: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.ended_s is None:
            self.ended_s = time.perf_counter()
