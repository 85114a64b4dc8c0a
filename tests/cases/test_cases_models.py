"""Cases of users: kinds of models, of inputs and of precision."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu

from .support import assert_same_logs, assert_same_weights, fit_both, gpus, pair, regression

# Keras says so of every dataset of unknown length, after its first epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


class TwoDense(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(3, activation="relu"), layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(TwoDense, id="subclassed"),
        pytest.param(lambda: keras.Sequential([layers.Dense(3), layers.Dense(1)]), id="sequential"),
    ],
)
def test_subclass(build, depth):
    """Neither has weights before the first batch."""
    plain, parallel = pair(build, 3, depth=depth)
    assert_same_logs(*fit_both(plain, parallel, *regression(13), batch_size=5, epochs=2))
    assert_same_weights(plain, parallel)
    assert len(parallel.optimizer.variables) == len(plain.optimizer.variables)


class OwnTrainStep(TwoDense):
    def train_step(self, data):
        return super().train_step(data)


class OwnTestStep(TwoDense):
    def test_step(self, data):
        return super().test_step(data)


@pytest.mark.parametrize(("model", "method"), [(OwnTrainStep, "train_step"), (OwnTestStep, "test_step")])
def test_train_step_refused(model, method):
    with pytest.raises(mgpu.ModelError, match=rf"{method}.*gpus=1"):
        mgpu.make_parallel(model(), gpus=gpus(2))


def test_train_step_is_honoured_on_one_tower():
    plain, parallel = pair(OwnTrainStep, 1)
    assert_same_logs(*fit_both(plain, parallel, *regression(8), batch_size=4))
    assert_same_weights(plain, parallel)


def half_dense():
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8, dtype="mixed_float16"),
            layers.Dense(8, dtype="mixed_float16"),
            layers.Dense(1, dtype="float32"),
        ]
    )


def embedding():
    return keras.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(1)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [half_dense, embedding])
@pytest.mark.parametrize("jit_compile", [True, "auto"])
def test_amp_xla(build, jit_compile):
    """It trains with XLA, or says in one warning that it is off."""
    x, y = regression(16)
    if build is embedding:
        x = np.random.default_rng(0).integers(20, size=(16, 4))
    plain, parallel = pair(
        build,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.02),
            "loss": "mse",
            "jit_compile": jit_compile,
        },
    )
    plain.compile(keras.optimizers.SGD(0.02), "mse", jit_compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = fit_both(plain, parallel, x, y, batch_size=8, epochs=2)
    assert len([w for w in caught if "mgpu" in w.filename or "XLA" in str(w.message)]) <= 1
    assert_same_logs(*logs, rtol=2e-2)  # float16 rounds at 5e-4, several times in a row
    assert_same_weights(plain, parallel, rtol=2e-2, atol=5e-3)


def test_amp_overflow():
    """An overflow on one tower skips the step, and the scale falls once, as on one device."""

    def compile_args():
        inner = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15, dynamic_growth_steps=2)
        return {"optimizer": optimizer, "loss": "mse"}

    def build():
        return keras.Sequential([layers.Input((4,)), layers.Dense(1, dtype="mixed_float16")])

    x, y = regression(8)
    plain, parallel = pair(build, compile_args=compile_args)
    for scale, moves in ((1e5, False), (1.0, None)):
        targets = y * np.where(np.arange(8) == 0, scale, 1.0)[:, None].astype("float32")
        before = parallel.get_weights()
        fit_both(plain, parallel, x, targets, batch_size=8)
        if moves is False:
            np.testing.assert_array_equal(parallel.get_weights()[0], before[0])
        assert_same_weights(plain, parallel, rtol=2e-2, atol=5e-3)
        assert float(parallel.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale) == 2.0**14
        assert int(parallel.optimizer.iterations) == int(plain.optimizer.iterations)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_indexed_slices(optimizer):
    """Duplicate ids, on one tower and on several, are added once each."""

    def build():
        return keras.Sequential(
            [
                layers.Input((10,), dtype="int32"),
                layers.Embedding(5001, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]
        )

    arguments = {"SGD": {"learning_rate": 1.0, "momentum": 0.9}, "Adam": {"epsilon": 1e-3}}[optimizer]
    plain, parallel = pair(
        build,
        3,
        compile_args=lambda: {"optimizer": getattr(keras.optimizers, optimizer)(**arguments), "loss": "mse"},
    )
    ids = np.random.default_rng(0).choice([0, 0, 3, 5000], size=(13, 10))
    logs = fit_both(plain, parallel, ids, (ids == 3).mean(axis=1, keepdims=True), batch_size=6, epochs=2)
    assert_same_logs(*logs)
    assert_same_weights(plain, parallel, rtol=1e-4, atol=1e-5)  # Adam amplifies rounding


def lookup_model():
    number = layers.Input((2,), name="number")
    word = layers.Input((2,), dtype="string", name="word")
    ids = layers.StringLookup(vocabulary=["a", "b", "c"])(word)
    joined = layers.Concatenate()([number, layers.Flatten()(layers.Embedding(4, 2)(ids))])
    return keras.Model({"number": number, "word": word}, layers.Dense(1)(joined))


@pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
def test_string_gpu(depth):
    """Strings stay on the host; numbers are staged."""
    rng = np.random.default_rng(0)
    features = {
        "number": rng.normal(size=(13, 2)).astype("float32"),
        "word": rng.choice(["a", "b", "zzz"], size=(13, 2)),
    }
    dataset = tf.data.Dataset.from_tensor_slices((features, features["number"][:, :1])).batch(5)
    plain, parallel = pair(lookup_model, 2, depth=depth)
    assert_same_logs(*fit_both(plain, parallel, dataset, epochs=2, validation_data=dataset))
    assert_same_weights(plain, parallel)
    np.testing.assert_allclose(
        parallel.predict(dataset, verbose=0), plain.predict(dataset, verbose=0), rtol=1e-5, atol=1e-6
    )


class IgnoresIds(TwoDense):
    """Takes a dict with a column of string ids that it does not use."""

    def call(self, inputs):
        return super().call(inputs["x"])


def test_string_gpu_when_the_column_is_unused():
    x, y = regression(13)
    names = np.array([f"row {i}" for i in range(13)])
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x, "id": names}, y)).batch(5)
    plain, parallel = pair(IgnoresIds, 2)
    assert_same_logs(*fit_both(plain, parallel, dataset, epochs=2))
    assert_same_weights(plain, parallel)


class SumsRagged(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.out = layers.Embedding(9, 3), layers.Dense(1)

    def call(self, ids):
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_tensor(shape=(None, 6))
        return self.out(ops.mean(self.table(ids), axis=1))


@pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
def test_ragged(depth):
    """Ragged rows are cut by rows; or the data is refused before the first step, by name."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 9, size=length).tolist() for length in (1, 5, 0, 2, 3, 6, 1, 4)]
    x, y = tf.ragged.constant(rows, dtype=tf.int32), np.array([[len(row)] for row in rows], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    plain, parallel = pair(SumsRagged, 2, depth=depth)
    try:
        got = parallel.fit(dataset, validation_data=dataset, epochs=2, shuffle=False, verbose=0).history
    except mgpu.DataError as refused:
        assert "agged" in str(refused)  # noqa: PT017
        return
    expected = plain.fit(dataset, validation_data=dataset, epochs=2, shuffle=False, verbose=0).history
    assert_same_logs(expected, got)
    assert_same_weights(plain, parallel)


@pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
def test_ragged_when_padded_to_each_batch(depth):
    """Dense batches of another length at each step."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.integers(1, 9, size=(rows, length)).astype("int32"), rng.normal(size=(rows, 1)).astype("float32"))
        for rows, length in ((4, 2), (4, 6), (4, 3), (1, 5))
    ]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 1), tf.float32)),
    )
    plain, parallel = pair(SumsRagged, 2, depth=depth)
    assert_same_logs(*fit_both(plain, parallel, dataset, epochs=2, validation_data=dataset))
    assert_same_weights(plain, parallel)


def test_ragged_when_sparse():
    """A SparseTensor is cut by rows, or refused by name."""

    def build():
        return keras.Sequential([layers.Input((6,), sparse=True), layers.Dense(1)])

    dense = np.random.default_rng(0).normal(size=(9, 6)).astype("float32")
    dense[:, ::2] = 0
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), dense[:, 1:2])).batch(4)
    plain, parallel = pair(build, 2)
    try:
        got = parallel.fit(data, epochs=2, shuffle=False, verbose=0).history
    except mgpu.DataError as refused:
        assert "parse" in str(refused)  # noqa: PT017
        return
    assert_same_logs(plain.fit(data, epochs=2, shuffle=False, verbose=0).history, got)
    assert_same_weights(plain, parallel)


def test_assigned_weight_refused():
    """A weight that the forward pass assigns cannot be shared by towers: refused by name, not dropped."""
    _, parallel = pair(
        build=lambda: keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(layers.Dense(3))]),
        compile_args=lambda: {"optimizer": "sgd", "loss": "mse"},
    )
    x, _ = regression(8)
    with pytest.raises(
        mgpu.ModelError, match=r"assigns its trainable weight .*kernel.*kernel_constraint, or pass gpus=1"
    ):
        parallel.fit(x, np.zeros((8, 3), "float32"), verbose=0)
