"""Cases of users: the order of rows, the end of the data, sources that fail, what a batch is."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu

from .support import assert_same_logs, assert_same_weights, d0, fit_both, gpus, pair, regression
from .test_cases_batches import Rows

# Keras says so of every dataset of unknown length, after its first epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 4], ids="depth{}".format)
MOMENTUM = {"compile_args": lambda: {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"}}


class Stop(keras.callbacks.Callback):
    """Ends the training after some batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.batches:
            self.model.stop_training = True


@pytest.mark.parametrize("depth", [0, 1, 2, 4], ids="depth{}".format)
def test_stage_order(depth):
    """Rows in another order, lost or used twice end in other weights; other data follows at once."""
    plain, parallel = pair(depth=depth, **MOMENTUM)
    x, y = regression(10)
    assert_same_logs(*fit_both(plain, parallel, x, y, batch_size=3, epochs=2))
    assert parallel.evaluate(x[:4], y[:4], verbose=0) == pytest.approx(plain.evaluate(x[:4], y[:4], verbose=0))
    assert_same_logs(*fit_both(plain, parallel, *regression(8, seed=1), batch_size=3))
    assert_same_weights(plain, parallel)
    assert not any(size for sizes in parallel.staging_sizes().values() for size in sizes)


@DEPTHS
def test_stage_order_when_rows_hold_their_index(depth):
    """The rows that a step sees are recorded: each once, in order, as predict returns them."""
    seen = []

    class Recorder(layers.Layer):
        def call(self, inputs):
            return tf.ensure_shape(tf.numpy_function(self.record, [inputs], tf.float32), inputs.shape)

        @staticmethod
        def record(rows):
            seen.append(rows[:, 0].tolist())
            return rows

    inputs = layers.Input((1,))
    model = mgpu.make_parallel(keras.Model(inputs, Recorder()(inputs)), gpus=gpus(2), staging_depth=depth)
    index = np.arange(10, dtype="float32")[:, None]
    np.testing.assert_array_equal(model.predict(index, batch_size=4, verbose=0), index)
    assert {row for rows in seen for row in rows} == set(range(10))


@DEPTHS
def test_stage_order_when_stopped_in_mid_epoch(depth):
    plain, parallel = pair(depth=depth, **MOMENTUM)
    x, y = regression(20)
    for model in (plain, parallel):
        model.fit(x, y, batch_size=3, shuffle=False, verbose=0, epochs=3, callbacks=[Stop(2)])
    assert_same_logs(*fit_both(plain, parallel, *regression(8, seed=1), batch_size=3))
    assert_same_weights(plain, parallel)


class SourceFault(Exception):
    """What a user's own data code raises."""


def failing_generator(x, y, good):
    for step in range(good):
        yield x[3 * step : 3 * step + 3], y[3 * step : 3 * step + 3]
    raise SourceFault("the disk is gone")


class FailingRows(Rows):
    def __init__(self, *args, good, **kwargs):
        super().__init__(*args, **kwargs)
        self.good = good

    def __getitem__(self, index):
        if index >= self.good:
            raise SourceFault("the disk is gone")
        return super().__getitem__(index)


@DEPTHS
@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
@pytest.mark.parametrize("good", [1, 4], ids="after-{}".format)
def test_stage_order_when_the_source_fails(kind, good, depth):
    """The error arrives as itself, after exactly the batches before it; the next fit works."""
    plain, parallel = pair(depth=depth, **MOMENTUM)
    x, y = regression(18)
    if kind == "generator":
        data = failing_generator(x, y, good)
    else:
        data = FailingRows(x, y, 3, good=good)
    with pytest.raises(SourceFault, match="the disk is gone"):
        parallel.fit(data, verbose=0, shuffle=False)
    del data
    gc.collect()  # the callbacks of Keras 3.6 own a pool of threads, which ends when they are freed
    if good >= 2:  # Keras reads two batches before the first step, to learn their shapes
        plain.fit(x[: 3 * good], y[: 3 * good], batch_size=3, shuffle=False, verbose=0)
    assert_same_weights(plain, parallel)
    assert_same_logs(*fit_both(plain, parallel, *regression(7, seed=1), batch_size=3))
    assert_same_weights(plain, parallel)


@DEPTHS
def test_stage_order_when_interrupted(depth):
    """Ctrl-C in mid-epoch: what was staged is dropped, no thread stays, and the next fit is right."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    plain, parallel = pair(depth=depth, **MOMENTUM)
    x, y = regression(20)
    with pytest.raises(KeyboardInterrupt):
        parallel.fit(x, y, batch_size=3, shuffle=False, verbose=0, callbacks=[Interrupt()])
    plain.fit(x[:6], y[:6], batch_size=3, shuffle=False, verbose=0)
    assert not any(size for sizes in parallel.staging_sizes().values() for size in sizes)
    assert_same_logs(*fit_both(plain, parallel, x, y, batch_size=3))
    assert_same_weights(plain, parallel)


@pytest.mark.parametrize(
    ("how", "depth"),
    [
        ("arrays", 1),
        ("unknown cardinality", 1),
        ("endless", 0),
        ("endless", 1),
        ("endless", 4),
        ("finite generator", 4),
    ],
)
def test_out_of_data(how, depth):
    """The steps of an epoch do not depend on the towers; each epoch starts anew; no warning but Keras' own."""
    x, y = regression(50)
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    plain, parallel = pair(depth=depth, **MOMENTUM)

    def data():
        return {
            "arrays": {"x": x, "y": y, "batch_size": 8},
            "unknown cardinality": {"x": batches.filter(lambda x, y: True)},
            # No row is lost between the epochs: the second starts where the first was cut.
            "endless": {"x": batches.repeat(), "steps_per_epoch": 5},
            "finite generator": {"x": (b for b in list(batches.repeat(3))), "steps_per_epoch": 7},
        }[how]

    histories, warned = [], []
    for model, callbacks in ((plain, []), (parallel, [count])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            history = model.fit(
                **data(), epochs=3, shuffle=False, verbose=0, validation_data=batches, callbacks=callbacks
            )
        histories.append(history.history)
        warned.append([str(w.message) for w in caught if w.category is UserWarning])
    assert steps == list(range(5 if how == "endless" else 7)) * 3
    assert_same_logs(*histories)
    assert_same_weights(plain, parallel)
    assert warned[1] == warned[0]


def two_inputs():
    left, right = layers.Input((2,)), layers.Input((2,))
    return keras.Model((left, right), layers.Dense(1)(layers.Concatenate()([left, right])))


@pytest.mark.parametrize(
    ("finite", "depth"), [(True, 0), (True, 4), (False, 1)], ids=["finite-0", "finite-4", "infinite-1"]
)
def test_generator(finite, depth):
    x, y = regression(13)

    def generator():
        while True:
            for start in range(0, 13, 4):
                rows = slice(start, start + 4)
                yield (x[rows, :2], x[rows, 2:]), y[rows]
            if finite:
                return

    plain, parallel = pair(two_inputs, depth=depth, **MOMENTUM)
    steps = {} if finite else {"steps_per_epoch": 3, "epochs": 3}
    histories = [model.fit(generator(), shuffle=False, verbose=0, **steps).history for model in (plain, parallel)]
    assert_same_logs(*histories)
    assert_same_weights(plain, parallel)


@DEPTHS
def test_generator_when_workers_read(depth):
    """A PyDataset with two workers keeps its order and length."""
    x, y = regression(22)
    plain, parallel = pair(depth=depth, **MOMENTUM)
    histories = [
        model.fit(Rows(x, y, 3, workers=2, max_queue_size=3), shuffle=False, verbose=0, epochs=2).history
        for model in (plain, parallel)
    ]
    assert_same_logs(*histories)
    assert_same_weights(plain, parallel)


def test_generator_when_a_frame_of_pandas():
    pandas = pytest.importorskip("pandas")
    x, y = regression(13)
    plain, parallel = pair(**MOMENTUM)
    assert_same_logs(*fit_both(plain, parallel, pandas.DataFrame(x), pandas.DataFrame(y), batch_size=5))
    assert_same_weights(plain, parallel)


def test_generator_when_numpy_shuffles():
    """With shuffle=True both see the same rows in the same order under the same seed."""
    x, y = regression(22)
    plain, parallel = pair(**MOMENTUM)
    histories = []
    for model in (plain, parallel):
        keras.utils.set_random_seed(3)
        histories.append(model.fit(x, y, batch_size=5, epochs=2, verbose=0).history)
    assert_same_logs(*histories)
    assert_same_weights(plain, parallel)


def test_shard_warn(capfd):
    """One process has nothing to shard: TensorFlow must not dump the pipeline's graph."""
    x, y = regression(12)
    _, parallel = pair()
    parallel.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), epochs=2, verbose=0, shuffle=False)
    parallel.fit((batch for batch in [(x, y)] * 3), verbose=0, shuffle=False)
    text = "".join(capfd.readouterr()).lower()
    assert "shard" not in text
    assert len(text) < 2000


@pytest.mark.parametrize("towers", [1, 4])
def test_batch_meaning(towers):
    """batch_size counts the rows of all towers: 128 rows in batches of 32 are four steps, everywhere."""
    x, y = regression(128)
    _, parallel = pair(d0, towers)
    counts = {"train": 0, "test": 0, "predict": 0}

    def counting(mode):
        def count(batch, logs):
            counts[mode] += 1

        return count

    callback = keras.callbacks.LambdaCallback(**{f"on_{mode}_batch_end": counting(mode) for mode in ("train",)})
    callback.on_test_batch_end = counting("test")
    callback.on_predict_batch_end = counting("predict")
    parallel.fit(x, y, batch_size=32, verbose=0, callbacks=[callback])
    parallel.evaluate(x, y, batch_size=32, verbose=0, callbacks=[callback])
    parallel.predict(x, batch_size=32, verbose=0, callbacks=[callback])
    assert counts == {"train": 4, "test": 4, "predict": 4}
    assert int(parallel.optimizer.iterations) == 4


@DEPTHS
def test_stage_shape(depth):
    """Images with an unknown number of rows, an uneven last batch, and a length that varies."""

    def build():
        inputs = layers.Input((None, 4, 1))
        return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(layers.Conv2D(2, 2)(inputs))))

    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(rows, side, 4, 1)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32"))
        for rows, side in ((4, 4), (4, 6), (3, 5))
    ]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(tf.TensorSpec((None, None, 4, 1)), tf.TensorSpec((None, 1))),
    )
    plain, parallel = pair(build, depth=depth)
    assert_same_logs(*fit_both(plain, parallel, dataset, epochs=2))
    assert_same_weights(plain, parallel)


def test_stage_shape_without_patching_keras():
    """Nothing of Keras or TensorFlow is replaced at run time."""
    watched = (keras.Model, keras.Layer, keras.optimizers.Optimizer, keras.losses.Loss, tf.data.Dataset, tf.Variable)
    before = [dict(vars(cls)) for cls in watched]
    _, parallel = pair()
    parallel.fit(*regression(8), verbose=0)
    for cls, names in zip(watched, before, strict=True):
        changed = [name for name, value in vars(cls).items() if names.get(name) is not value]
        assert [name for name in changed if not name.startswith("_abc")] == [], cls


# 6 batches. Keras 3.6 loses the logs of an execution in which the data run out, so there 5 has nothing to compare with.
@pytest.mark.parametrize("steps_per_execution", [2, 5 if keras.__version__.split(".")[1] not in ("6", "7", "8") else 3])
def test_steps_per_execution(steps_per_execution):
    plain, parallel = pair(
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
            "loss": "mse",
            "steps_per_execution": steps_per_execution,
        }
    )
    x, y = regression(22)
    assert_same_logs(*fit_both(plain, parallel, x, y, batch_size=4, epochs=2, validation_data=(x[:9], y[:9])))
    assert_same_weights(plain, parallel)
    np.testing.assert_allclose(
        parallel.predict(x, batch_size=4, verbose=0), plain.predict(x, batch_size=4, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_run_eagerly():
    plain, parallel = pair(
        compile_args=lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "run_eagerly": True}
    )
    assert_same_logs(*fit_both(plain, parallel, *regression(11), batch_size=4))
    assert_same_weights(plain, parallel)


def test_generator_when_a_torch_data_loader():
    """Tried where torch is installed; it is none of mgpu's dependencies."""
    torch_data = pytest.importorskip("torch.utils.data")
    import torch

    x, y = regression(11)
    plain, parallel = pair()
    rows = torch_data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    logs = [
        model.fit(torch_data.DataLoader(rows, batch_size=4), epochs=2, shuffle=False, verbose=0).history
        for model in (plain, parallel)
    ]
    assert_same_logs(*logs)
    assert_same_weights(plain, parallel)
