"""Train the same small models with plain Keras, tf.distribute.MirroredStrategy and mgpu, and compare the numbers.

Each model starts from the same weights and sees the same rows in the same order three times: on one device, and on
two logical CPU devices with each of the two. Each line of the table tells how far what they end with lies from the
plain model's. Needs no GPU, and about a minute of processor time. Run: python examples/peers.py
"""

import contextlib
import functools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import mgpu

DEVICES = mgpu.set_logical_cpu_devices(2)
NUM_EPOCHS = 2


# ---- data: x and y, and sample weights where a case has them


def regression(rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return {"x": x, "y": x[:, :1] - 2 * x[:, 1:2] + rng.normal(size=(rows, 1)).astype("float32")}


def two_groups(rows):
    """In each batch of 4, rows 0 and 1 (device 0) lie around 0, rows 2 and 3 (device 1) around 4."""
    data = regression(rows)
    data["x"] += np.where(np.arange(rows)[:, np.newaxis] % 4 < 2, 0, 4).astype("float32")
    return data


def weighted(rows):
    weights = np.linspace(0.1, 3, rows).astype("float32")
    return {**regression(rows), "sample_weight": weights}


def padded(rows):
    """Sequences of 1, 2, ... steps, filled up to 6 with zeros."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, size=(rows, 6))
    x[np.arange(6) >= 1 + np.arange(rows)[:, np.newaxis] % 6] = 0
    return {"x": x, "y": x[..., np.newaxis].astype("float32") / 9}


def binary(rows):
    data = regression(rows)
    return {"x": data["x"], "y": (data["y"] > 0).astype("float32")}


# ---- models


def dense(**first):
    def build():
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh", **first), layers.Dense(1)])

    return build


def normalised(**options):
    def build():
        return keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(momentum=0.5, **options), layers.Dense(1)]
        )

    return build


def masked():
    return keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True), layers.Dense(1)])


def classifier():
    return keras.Sequential([keras.Input((4,)), layers.Dense(1, activation="sigmoid")])


def spread_error(y_true, y_pred):
    """A loss that looks at all rows of the batch together."""
    error = y_true - y_pred
    return ops.mean(ops.square(error)) + ops.square(ops.mean(error))


# ---- what is compared: functions of a trained model and the logs of each epoch


def loss(model, logs):
    return logs["loss"]


def weights(model, logs):
    return np.concatenate([np.ravel(v) for v in model.trainable_variables])


def moving_mean(model, logs):
    return model.layers[0].moving_mean


def moving_variance(model, logs):
    return model.layers[0].moving_variance


def metric(name):
    def value(model, logs):
        return logs[name]

    value.__name__ = name
    return value


def sgd(**options):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, **options), "loss": "mse"}


def weighted_mean():
    return {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    }


def with_metrics():
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="accuracy")]
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "binary_crossentropy", "metrics": metrics}


def custom_loss():
    return {"optimizer": keras.optimizers.SGD(0.02), "loss": spread_error}


PENALTIES = {
    "kernel_regularizer": keras.regularizers.L2(0.1),
    "activity_regularizer": keras.regularizers.L1(0.1),
}

# Name, model, compile arguments, data, what is compared. Batches have 4 rows, so 16 rows split evenly, 15 leave a last
# batch of 3, and 13 a last batch of 1, with no row for one of the two devices.
CASES = [
    ("even batches", dense(), sgd(), regression(16), [loss, weights]),
    ("a last batch of 3 rows", dense(), sgd(), regression(15), [loss, weights]),
    ("a last batch of 1 row", dense(), sgd(), regression(13), [loss, weights]),
    ("sample weights", dense(), sgd(), weighted(16), [loss, weights]),
    ("sample weights, divided by their sum", dense(), weighted_mean, weighted(16), [loss, weights]),
    ("masked time steps", masked, sgd(), padded(16), [loss, weights]),
    ("L2 and activity penalties", dense(**PENALTIES), sgd(), regression(16), [loss, weights]),
    ("loss over the whole batch", dense(), custom_loss, regression(16), [loss, weights]),
    ("global_clipnorm", dense(), sgd(global_clipnorm=0.5), regression(16), [weights]),
    ("gradient accumulation", dense(), sgd(gradient_accumulation_steps=2), regression(16), [weights]),
    ("metrics", classifier, with_metrics, binary(16), [metric("auc"), metric("accuracy")]),
    ("BatchNormalization, synchronised", normalised(synchronized=True), sgd(), two_groups(16), [
        loss, weights, moving_mean, moving_variance,
    ]),
    ("BatchNormalization", normalised(), sgd(), two_groups(16), [moving_mean, moving_variance]),
]  # fmt: skip

# Batch statistics of a part are not those of the batch: here no trainer that leaves each device to itself can agree.
NOT_INVARIANT = {("BatchNormalization", "moving_variance")}


@functools.cache
def mirrored_strategy():
    """One for all cases: the collective operations of two in one process abort each other."""
    return tf.distribute.MirroredStrategy(DEVICES)


def trained(build, compile_args, data, start, how):
    """Return the model, trained from the weights `start`, and its logs."""
    with mirrored_strategy().scope() if how == "MirroredStrategy" else contextlib.nullcontext():
        model = build()
        model.set_weights(start)
        if how == "mgpu":
            model = mgpu.make_parallel(model, gpus=DEVICES)
        model.compile(jit_compile=False, **compile_args())
    return model, model.fit(**data, batch_size=4, epochs=NUM_EPOCHS, shuffle=False, verbose=0).history


def compared(build, compile_args, data, quantities):
    """Yield, for each quantity, its name, its largest value in the plain model, and the two largest differences."""
    start = build().get_weights()
    found = {}
    for how in ("plain", "MirroredStrategy", "mgpu"):
        try:
            model, logs = trained(build, compile_args, data, start, how)
        except Exception as error:  # what a trainer cannot do belongs in the table
            if how != "MirroredStrategy":
                raise
            found[how] = [type(error).__name__] * len(quantities)
        else:
            found[how] = [np.asarray(quantity(model, logs), "float64") for quantity in quantities]
    for quantity, plain, *others in zip(quantities, *found.values(), strict=True):
        # NaN in one of two models is a difference without a size; np.max passes it on.
        far = [other if isinstance(other, str) else np.max(np.abs(other - plain)) for other in others]
        yield quantity.__name__, np.max(np.abs(plain)), *far


def main():
    tf.get_logger().setLevel("ERROR")
    keras.utils.set_random_seed(0)
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, mgpu {mgpu.__version__}, Python {python}")
    print(f"Largest differences to the plain model after {NUM_EPOCHS} epochs, batches of 4, on {', '.join(DEVICES)}\n")
    row = "{:37} {:16} {:>7} {:>16} {:>9}"
    print(row.format("case", "compared", "size", "MirroredStrategy", "mgpu"))
    for name, build, compile_args, data, quantities in CASES:
        for what, size, *far in compared(build, compile_args, data, quantities):
            mark = " *" if (name, what) in NOT_INVARIANT else ""
            shown = [value if isinstance(value, str) else f"{value:.1e}" for value in far]
            print(row.format(name, what + mark, f"{size:.3g}", *shown))
    print("\nsize: the largest absolute value of what is compared, in the plain model")
    print("*: cannot be equal, since each device normalises its own rows; see docs/correctness.md")


if __name__ == "__main__":
    main()
