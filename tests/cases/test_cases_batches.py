"""Cases of users: batches that do not divide, towers without rows, models of one fixed batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu

from .support import assert_same_logs, assert_same_weights, fit_both, gpus, pair, regression


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return -(-len(self.x) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


def source(kind, x, y, batch_size):
    """Return the arguments for fit."""
    if kind == "arrays":
        return (x, y), {"batch_size": batch_size}
    if kind == "PyDataset":
        return (Rows(x, y, batch_size),), {}
    return (tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size),), {}


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("arrays", 0), ("arrays", 1), ("arrays", 4), ("PyDataset", 1), ("tf.data", 1)],
    ids="{}".format,
)
@pytest.mark.parametrize(
    ("towers", "rows", "batch_size"),
    [
        pytest.param(2, 115, 16, id="remainder"),
        pytest.param(3, 10, 4, id="last-of-two"),
        pytest.param(4, 9, 8, id="last-of-one"),
    ],
)
def test_uneven_crash(towers, rows, batch_size, kind, depth):
    plain, parallel = pair(towers=towers, depth=depth)
    args, kwargs = source(kind, *regression(rows), batch_size)
    assert_same_logs(*fit_both(plain, parallel, *args, **kwargs))
    assert_same_weights(plain, parallel)


@pytest.mark.parametrize("towers", [2, 3])
def test_empty_nan(towers):
    """The last batch has one row: the other towers' means are 0/0 and must not be heard."""

    def build():
        return keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)])

    _, parallel = pair(
        build,
        towers,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.01),
            "loss": lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred)),
            "metrics": ["mae"],
        },
    )
    x, y = regression(13)
    history = parallel.fit(x, y, batch_size=6, epochs=2, validation_data=(x[:7], y[:7]), verbose=0).history
    assert all(np.isfinite(values).all() for values in history.values())
    assert all(np.isfinite(w).all() for w in parallel.get_weights())
    assert np.isfinite(parallel.predict(x, batch_size=6, verbose=0)).all()


def stateful():
    return keras.Sequential(
        [layers.Input(batch_shape=(16, 5, 3)), layers.LSTM(8, stateful=True, name="memory"), layers.Dense(1)]
    )


def test_stateful_refused():
    with pytest.raises(mgpu.ModelError, match=r"'memory'.*stateful=False"):
        mgpu.make_parallel(stateful(), gpus=gpus(2))


def test_fixed_batch_refused():
    model = keras.Sequential([layers.Input(batch_shape=(16, 3), name="fixed"), layers.Dense(1)])
    with pytest.raises(mgpu.ModelError, match=r"'fixed'.*16.*Input\(shape="):
        mgpu.make_parallel(model, gpus=gpus(2))


def test_stateful_works_on_one_tower():
    x = np.random.default_rng(0).normal(size=(32, 5, 3)).astype("float32")
    plain, parallel = pair(stateful, 1)
    assert_same_logs(*fit_both(plain, parallel, x, x[:, 0, :1], batch_size=16))
    assert_same_weights(plain, parallel)
