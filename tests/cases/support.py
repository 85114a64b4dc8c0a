"""Shared by the cases: the small model D0, its data, and a plain model beside its parallel twin."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from mgpu import make_parallel

# Sums of float32 in another order differ by a few units in the last place (6e-8); a few steps carry
# that into the weights. A row lost, or counted twice, is thousands of times larger.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def gpus(towers: int) -> list[str]:
    return [f"/CPU:{tower}" for tower in range(towers)]


def d0() -> keras.Model:
    return keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(1)])


def regression(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x (rows, 4) and y (rows, 1), float32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, x @ np.array([[1], [-2], [0.5], [1]], "float32") + rng.normal(size=(rows, 1)).astype("float32")


def pair(
    build: Callable[[], keras.Model] = d0,
    towers: int = 2,
    *,
    depth: int = 1,
    compile_args: Callable[[], dict[str, Any]] | None = None,
    **parallel_args: Any,
) -> tuple[keras.Model, keras.Model]:
    """Return a plain model and the parallel form of one that starts with the same weights, compiled alike."""
    compile_args = compile_args or (lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"})
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(build())
    plain, twin = models
    if plain.built:
        twin.set_weights(plain.get_weights())
    parallel = make_parallel(twin, gpus=gpus(towers), staging_depth=depth, **parallel_args)
    plain.compile(**{"jit_compile": False, **compile_args()})
    parallel.compile(**{"jit_compile": False, **compile_args()})
    return plain, parallel


def fit_both(plain: keras.Model, parallel: keras.Model, *args: Any, **kwargs: Any) -> tuple[dict, dict]:
    """Train both on the same arguments; return the two histories."""
    kwargs = {"shuffle": False, "verbose": 0, **kwargs}
    return tuple(model.fit(*args, **kwargs).history for model in (plain, parallel))


def assert_same_weights(plain: keras.Model, parallel: keras.Model, **tolerances: float) -> None:
    expected, got = plain.get_weights(), parallel.get_weights()
    assert len(expected) == len(got)
    for variable, a, b in zip(plain.weights, expected, got, strict=True):
        np.testing.assert_allclose(b, a, **{**CLOSE, **tolerances}, err_msg=variable.path)


def assert_same_logs(expected: dict[str, Any], got: dict[str, Any], **tolerances: float) -> None:
    assert list(got) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, **{**CLOSE, **tolerances}, err_msg=key)
