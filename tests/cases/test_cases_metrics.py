"""Cases of users: metrics, validation, prediction, weights and masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from .support import assert_same_logs, assert_same_weights, fit_both, pair, regression

# Keras says so of every dataset of unknown length, after its first epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


class Misses(keras.metrics.Metric):
    """A user's own metric: counts wrong answers."""

    def __init__(self, name="misses", **kwargs):
        super().__init__(name=name, **kwargs)
        self.wrong = self.add_variable(shape=(), initializer="zeros", name="wrong")

    def update_state(self, y_true, y_pred, sample_weight=None):
        missed = ops.not_equal(ops.cast(y_true, "bool"), y_pred > 0.5)
        self.wrong.assign_add(ops.sum(ops.cast(missed, "float32")))

    def result(self):
        return self.wrong + 0.0


def binary_classifier():
    return keras.Sequential([layers.Input((4,)), layers.Dense(1, activation="sigmoid")])


@pytest.mark.parametrize("towers", [2, 3])
def test_metric_sum(towers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype("float32")
    y = (x[:, :1] + 0.5 * rng.normal(size=(200, 1)) > 0).astype("float32")
    names = ("TruePositives", "FalsePositives", "TrueNegatives", "FalseNegatives")

    def compile_args():
        metrics = keras.metrics
        return {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "binary_crossentropy",
            "metrics": [
                "accuracy",
                metrics.AUC(name="auc", num_thresholds=20),
                metrics.Precision(name="precision"),
                metrics.Recall(name="recall"),
                metrics.F1Score(threshold=0.5, name="f1"),
                *(getattr(metrics, name)(name=name) for name in names),
                Misses(),
            ],
        }

    plain, parallel = pair(binary_classifier, towers, compile_args=compile_args)
    fit_both(plain, parallel, x, y, batch_size=64)
    expected, got = (m.evaluate(x, y, batch_size=64, return_dict=True, verbose=0) for m in (plain, parallel))
    assert_same_logs(expected, got)
    assert sum(got[name] for name in names) == 200
    assert got["misses"] == got["FalsePositives"] + got["FalseNegatives"]
    for name in ("accuracy", "auc", "precision", "recall", "f1"):
        assert (np.asarray(got[name]) >= 0).all(), name
        assert (np.asarray(got[name]) <= 1).all(), name


def ten_classes():
    return keras.Sequential([layers.Input((4,)), layers.Dense(10, activation="softmax")])


@pytest.mark.parametrize("towers", [2, 3])
def test_metric_sum_when_ten_classes(towers):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(70, 4)).astype("float32"), rng.integers(10, size=70)
    plain, parallel = pair(
        ten_classes,
        towers,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
        },
    )
    assert_same_logs(*fit_both(plain, parallel, x, y, batch_size=32, epochs=2, validation_split=0.2))


def identity(structure):
    def build():
        inputs = layers.Input((1,))
        outputs = {
            "single": inputs * 1.0,
            "list": [inputs * 1.0, inputs * 2.0],
            "dict": {"one": inputs * 1.0, "two": inputs * 2.0},
        }
        return keras.Model(inputs, outputs[structure])

    return build


@pytest.mark.parametrize(("structure", "depth"), [("single", 0), ("list", 4), ("dict", 1)])
def test_predict_rows(structure, depth):
    x = np.arange(103, dtype="float32")[:, None]
    _, parallel = pair(identity(structure), 3, depth=depth)
    got = parallel.predict(x, batch_size=10, verbose=0)
    expected = {"single": x, "list": [x, 2 * x], "dict": {"one": x, "two": 2 * x}}[structure]
    keras.tree.assert_same_structure(expected, got)
    for a, b in zip(keras.tree.flatten(expected), keras.tree.flatten(got), strict=True):
        np.testing.assert_array_equal(b, a)


def test_predict_rows_when_lengths_vary():
    """Each batch has another length; Keras joins such outputs to a ragged result."""

    def build():
        inputs = layers.Input((None, 1))
        return keras.Model(inputs, inputs + 1.0)

    batches = [np.full((rows, length, 1), length, "float32") for rows, length in ((4, 2), (4, 3), (1, 5))]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tf.TensorSpec((None, None, 1), tf.float32)
    )
    plain, parallel = pair(build, 3)
    expected, got = (model.predict(dataset, verbose=0).to_list() for model in (plain, parallel))
    assert len(got) == 9
    assert got == expected


@pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
def test_val_ignored(depth):
    """Training targets are 0, validation targets 100: which data a loss was computed on shows."""
    x, _ = regression(13)
    plain, parallel = pair(depth=depth, compile_args=lambda: {"optimizer": "sgd", "loss": "mae"})
    hundred = tf.data.Dataset.from_tensor_slices((x, np.full((13, 1), 100.0, "float32"))).batch(4)
    train = tf.data.Dataset.from_tensor_slices((x, np.zeros((13, 1), "float32"))).batch(4)
    expected, got = fit_both(plain, parallel, train, epochs=2, validation_data=hundred)
    assert_same_logs(expected, got)
    assert min(got["val_loss"]) > 90 > max(got["loss"])
    assert parallel.evaluate(hundred, verbose=0) > 90
    np.testing.assert_allclose(parallel.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert not any(size for sizes in parallel.staging_sizes().values() for size in sizes)


def tagger():
    return keras.Sequential(
        [
            layers.Input((10,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.LSTM(3, return_sequences=True),
            layers.Dense(2, activation="softmax"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["mask", "mask-and-weights"])
def test_mask_norm(weighted):
    """Tower 0 has 90 % padding and tower 1 none: each dividing by its own count goes wrong."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 7, size=(8, 10)).astype("int32")
    ids[:4, 1:] = 0
    weights = rng.choice([0.0, 1.0, 2.0], size=(8, 10)).astype("float32") if weighted else None
    plain, parallel = pair(
        tagger,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(1.0),
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
        },
    )
    logs = fit_both(plain, parallel, ids, ids % 2, batch_size=8, epochs=2, sample_weight=weights)
    assert_same_logs(*logs)
    assert_same_weights(plain, parallel)


def two_class_d0():
    return keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.Dense(2, activation="softmax")])


@pytest.mark.parametrize("kind", ["class_weight", "sample_weight", "validation weights"])
def test_class_weight(kind):
    x, _ = regression(20)
    y = (x[:, 0] > 0).astype("int32")
    row_weights = np.tile([0.0, 0.0, 0.5, 3.0, 1.0], 4).astype("float32")
    more = {
        "class_weight": {"class_weight": {0: 1.0, 1: 10.0}},
        "sample_weight": {"sample_weight": row_weights},
        "validation weights": {"validation_data": (x, y, row_weights)},
    }[kind]
    plain, parallel = pair(
        two_class_d0,
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(name="weighted")],
        },
    )
    assert_same_logs(*fit_both(plain, parallel, x, y, batch_size=7, epochs=2, **more))
    assert_same_weights(plain, parallel)


def test_class_weight_when_one_a_time_step():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(13, 5, 4)).astype("float32")
    weights = rng.choice([0.0, 1.0, 3.0], size=(13, 5)).astype("float32")
    build = lambda: keras.Sequential([layers.Input((5, 4)), layers.Dense(1)])  # noqa: E731
    plain, parallel = pair(build)
    logs = fit_both(plain, parallel, x, x[..., :1], batch_size=7, epochs=2, sample_weight=weights)
    assert_same_logs(*logs)
    assert_same_weights(plain, parallel)


def test_class_weight_when_one_for_each_output():
    def build():
        inputs = layers.Input((4,))
        return keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in ("a", "b")})

    x, y = regression(13)
    rng = np.random.default_rng(1)
    weights = {name: rng.choice([0.0, 1.0, 3.0], size=13).astype("float32") for name in ("a", "b")}
    plain, parallel = pair(
        build, compile_args=lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": {"a": "mse", "b": "mae"}}
    )
    logs = fit_both(plain, parallel, x, {"a": y, "b": -y}, batch_size=7, epochs=2, sample_weight=weights)
    assert_same_logs(*logs)
    assert_same_weights(plain, parallel)
