"""The register of law models: a name, how to build the model, its data, and what may be asked of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

# The kinds of weights that `fit` can be given with the data.
#   none     no weights
#   rows     one weight a row, a third of them zero
#   class    `class_weight`
#   steps    one weight a time step, (rows, steps)
#   outputs  one set of row weights for each output
WEIGHTS_KINDS = ("none", "rows", "class", "steps", "outputs")

DataFn = Callable[[int, np.random.Generator], tuple[Any, Any]]


@dataclass(frozen=True)
class Built:
    """One fresh model with what it takes to train it."""

    model: keras.Model
    data: DataFn  # (rows, rng) -> (x, y)
    compile_args: Callable[[], dict[str, Any]]  # fresh optimizer, loss and metrics at each call


@dataclass(frozen=True)
class LawModel:
    """A row of the battery.

    Args:
        name: the builder's name.
        build: returns a `Built`; called once for the plain model and once for its twin.
        weights_kinds: which of WEIGHTS_KINDS Keras accepts for it.
        max_towers: 1 where only one tower can give the plain numbers (unsynchronised batch
            statistics, random masks), otherwise 4.
        rtol, atol: how far the two runs may differ. Sums of float32 taken in two orders differ by a
            few units in the last place (6e-8 each), and a handful of steps carries that through the
            weights: 1e-5 leaves two orders of magnitude, and is far below what one row counted
            twice or one tower too many would do. A model that needs more says why.
        num_classes: the classes of integer targets, for `class_weight`; 0 where it does not apply.
        steps: time steps of the targets, for per-step weights; 0 where it does not apply.
        parallel_args: further arguments for make_parallel.
        since_keras: the first Keras that trains the plain model.
    """

    name: str
    build: Callable[[], Built]
    weights_kinds: tuple[str, ...] = ("none", "rows")
    max_towers: int = 4
    rtol: float = 1e-5
    atol: float = 1e-6
    num_classes: int = 0
    steps: int = 0
    parallel_args: tuple[tuple[str, Any], ...] = ()
    since_keras: tuple[int, int] = (3, 6)

    @property
    def available(self) -> bool:
        """Whether this Keras can train the plain model at all."""
        return tuple(int(part) for part in keras.__version__.split(".")[:2]) >= self.since_keras


MODELS: dict[str, LawModel] = {}


def law_model(**flags: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register the decorated builder under its own name."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        name = build.__name__
        if name in MODELS:
            raise ValueError(f"two law models are called {name!r}")
        MODELS[name] = LawModel(name=name, build=build, **flags)
        return build

    return register


def sgd(learning_rate: float = 0.1, **more: Any) -> keras.optimizers.Optimizer:
    """Plain gradient descent: its update is linear in the gradient, so rounding is not amplified.

    Adam divides by the gradient's own size; where a gradient is nearly zero, rounding then decides
    the sign of a whole step. Models that do not test the optimizer use this.
    """
    return keras.optimizers.SGD(learning_rate, **more)


def tabular(features: int = 4, targets: int = 1) -> DataFn:
    """x (rows, features) normal, y (rows, targets) linear in it with some noise."""

    def data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(rows, features)).astype("float32")
        w = np.linspace(-1, 1, features * targets, dtype="float32").reshape(features, targets)
        noise = 0.1 * rng.normal(size=(rows, targets)).astype("float32")
        return x, x @ w + noise

    return data


def classes(features: int = 4, num_classes: int = 3) -> DataFn:
    """x (rows, features) normal, y (rows,) int32 in [0, num_classes)."""

    def data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(rows, features)).astype("float32")
        y = rng.integers(num_classes, size=rows).astype("int32")
        x[:, 0] += y  # something to learn
        return x, y

    return data


def binary(features: int = 4) -> DataFn:
    """x (rows, features) normal, y (rows, 1) float32 of 0 and 1."""

    def data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
        x = rng.normal(size=(rows, features)).astype("float32")
        return x, (x[:, :1] + 0.5 * rng.normal(size=(rows, 1)) > 0).astype("float32")

    return data


def images(num_classes: int = 3, side: int = 8, channels: int = 1) -> DataFn:
    """x (rows, side, side, channels) normal, y (rows,) int32."""

    def data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
        y = rng.integers(num_classes, size=rows).astype("int32")
        x = rng.normal(size=(rows, side, side, channels)).astype("float32")
        x[:, :, :, 0] += 0.3 * y[:, None, None]
        return x, y

    return data


def padded_ids(rows: int, rng: np.random.Generator, *, steps: int, vocabulary: int) -> np.ndarray:
    """Token ids (rows, steps) int32, padded with zeros on the right.

    The early rows are nearly all padding and the late ones have none: towers that each divide by
    their own count of valid steps go wrong.
    """
    ids = rng.integers(1, vocabulary, size=(rows, steps)).astype("int32")
    for row in range(rows):
        valid = 1 + (row * steps) // rows
        ids[row, valid:] = 0
    return ids
