"""Cases of users: callbacks, saving and resuming, devices, what has to be installed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu

from .support import assert_same_logs, assert_same_weights, d0, fit_both, gpus, pair, regression

ROOT = Path(__file__).parent.parent.parent


def adam():
    return {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": "mse"}


# ---- callbacks


def test_early_stop():
    x, y = regression(16)
    x_val, y_val = regression(9, seed=5)

    def stopper():
        return keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)

    plain, parallel = pair(compile_args=lambda: {"optimizer": keras.optimizers.SGD(0.3), "loss": "mse"})
    histories = [
        model.fit(
            x, y, batch_size=6, epochs=12, shuffle=False, verbose=0,
            validation_data=(x_val, y_val), callbacks=[stopper()],
        ).history
        for model in (plain, parallel)
    ]  # fmt: skip
    assert len(histories[0]["loss"]) == len(histories[1]["loss"]) < 12
    assert_same_weights(plain, parallel, rtol=1e-4, atol=1e-5)  # up to 12 epochs at a high rate


def test_early_stop_when_nan():
    x, y = regression(20)
    y[5] = np.nan
    _, parallel = pair()
    history = parallel.fit(
        x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    ).history
    assert len(history["loss"]) == 1
    assert int(parallel.optimizer.iterations) == 2


@pytest.mark.parametrize("callback", ["LearningRateScheduler", "ReduceLROnPlateau"])
def test_lr_callback(callback):
    def make():
        if callback == "LearningRateScheduler":
            return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0)

    x, y = regression(9)
    plain, parallel = pair(compile_args=adam)
    histories = [
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[make()]).history
        for model in (plain, parallel)
    ]
    assert_same_logs(*histories, rtol=1e-4)
    assert float(parallel.optimizer.learning_rate) == float(plain.optimizer.learning_rate) < 0.01
    assert_same_weights(plain, parallel, rtol=1e-4, atol=1e-5)


def test_lr_callback_when_a_schedule():
    """Keras' own message, not an AttributeError."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    plain, parallel = pair(compile_args=lambda: {"optimizer": keras.optimizers.SGD(schedule), "loss": "mse"})
    x, y = regression(8)
    fit_both(plain, parallel, x, y, batch_size=4)
    assert_same_weights(plain, parallel)
    errors = []
    for model in (plain, parallel):
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
        with pytest.raises(TypeError) as caught:
            model.fit(x, y, verbose=0, callbacks=[scheduler])
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


# ---- saving and resuming


@pytest.mark.parametrize("kind", ["save", "save_weights", "checkpoint", "checkpoint-weights"])
def test_save_wrap(kind, tmp_path):
    """The file is the plain model's: the same layers, loaded with no custom objects."""
    x, y = regression(8)
    _, parallel = pair(compile_args=adam)
    weights_only = kind in ("save_weights", "checkpoint-weights")
    path = tmp_path / ("d0.weights.h5" if weights_only else "d0.keras")
    checkpoint = keras.callbacks.ModelCheckpoint(
        path, monitor="loss", save_best_only=True, save_weights_only=weights_only
    )
    callbacks = [checkpoint] if kind.startswith("checkpoint") else []
    parallel.fit(x, y, verbose=0, callbacks=callbacks)
    if kind == "save":
        parallel.save(path)
    elif kind == "save_weights":
        parallel.save_weights(path)
    if weights_only:
        loaded = d0()
        loaded.load_weights(path)
    else:
        loaded = keras.models.load_model(path)
        assert type(loaded) is keras.Sequential
        assert [layer.name for layer in loaded.layers] == [layer.name for layer in parallel.layers]
        assert not hasattr(loaded, "towers")
        for a, b in zip(parallel.optimizer.variables, loaded.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), parallel.predict(x, verbose=0), rtol=1e-6)


@pytest.mark.slow
def test_save_wrap_when_loaded_in_a_fresh_process(tmp_path):
    """A process in which mgpu cannot be imported loads the file and predicts the same."""
    x, y = regression(8)
    _, parallel = pair()
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "d0.keras")
    np.save(tmp_path / "x.npy", x)
    run_python(
        """
        import sys
        sys.modules["mgpu"] = None
        import keras, numpy
        model = keras.models.load_model("d0.keras")
        numpy.save("predicted.npy", model.predict(numpy.load("x.npy"), verbose=0))
        """,
        tmp_path,
    )
    np.testing.assert_allclose(np.load(tmp_path / "predicted.npy"), parallel.predict(x, verbose=0), rtol=1e-6)


@pytest.mark.parametrize("towers", [(2, 2), (2, 3), (3, 1)], ids="{0[0]}-then-{0[1]}".format)
def test_resume_opt(towers, tmp_path):
    """Two epochs straight, and one epoch, a file, and one more epoch, end alike."""
    x, y = regression(14)
    straight, parallel = pair(towers=towers[0], compile_args=adam)
    straight.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    parallel.fit(x, y, batch_size=5, epochs=1, shuffle=False, verbose=0)
    parallel.save(tmp_path / "half.keras")
    resumed = mgpu.make_parallel(keras.models.load_model(tmp_path / "half.keras"), gpus=gpus(towers[1]))
    resumed.fit(x, y, batch_size=5, epochs=1, shuffle=False, verbose=0)
    assert_same_weights(straight, resumed, rtol=1e-4, atol=1e-5)  # Adam amplifies rounding
    assert int(resumed.optimizer.iterations) == 6
    assert list(resumed.towers) == gpus(towers[1])


def test_resume_opt_when_backup_restores(tmp_path):
    """A run that dies in its second epoch goes on from the backup of the first."""

    class Die(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise OSError("killed")

    x, y = regression(14)
    straight, parallel = pair(compile_args=adam)
    straight.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    fit = {"batch_size": 5, "epochs": 3, "shuffle": False, "verbose": 0}
    with pytest.raises(OSError, match="killed"):
        parallel.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Die()], **fit)
    _, again = pair(towers=3, compile_args=adam)
    again.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)], **fit)
    assert_same_weights(straight, again, rtol=1e-4, atol=1e-5)  # Adam amplifies rounding


def test_resume_opt_when_weights_are_loaded(tmp_path):
    """load_weights into a parallel model that has trained already."""
    x, y = regression(8)
    plain, parallel = pair()
    plain.save_weights(tmp_path / "d0.weights.h5")
    parallel.fit(x, y, verbose=0)
    parallel.load_weights(tmp_path / "d0.weights.h5")
    assert_same_weights(plain, parallel)
    fit_both(plain, parallel, x, y, batch_size=3)
    assert_same_weights(plain, parallel)


# ---- devices


def work_by_device(call):
    """Run `call`; return how many matrix products, or calls of a traced tower, its graphs place on each device.

    TensorFlow cuts the graph of a step into one for each device just before it runs it; these are read.
    """
    from tensorflow.python.eager import context  # the only way to learn where a function's ops run

    context.context().enable_graph_collection()
    try:
        call()
        metadata = context.export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    counts = {}
    for function in metadata.function_graphs:
        for node in (node for graph in function.partition_graphs for node in graph.node):
            if "MatMul" in node.op or "PartitionedCall" in node.op:
                device = "/" + node.device.rsplit("device:", 1)[-1]
                counts[device] = counts.get(device, 0) + 1
    return counts


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed", "loaded"])
def test_one_gpu_used(kind, tmp_path):
    """Every tower runs the forward and the backward pass of each step."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = layers.Dense(3), layers.Dense(1)

        def call(self, inputs):
            return self.out(self.hidden(inputs))

    def functional():
        inputs = layers.Input((4,))
        return keras.Model(inputs, layers.Dense(1)(layers.Dense(3)(inputs)))

    model = {"functional": functional, "subclassed": Subclassed}.get(kind, d0)()
    if kind == "loaded":
        model.save(tmp_path / "d0.keras")
        model = keras.models.load_model(tmp_path / "d0.keras")
    parallel = mgpu.make_parallel(model, gpus=gpus(3))
    parallel.compile("sgd", "mse", jit_compile=False)
    x, y = regression(6)
    counts = work_by_device(lambda: parallel.fit(x, y, batch_size=6, verbose=0))
    assert all(counts.get(tower, 0) >= 1 for tower in parallel.towers), counts
    assert set(counts) == set(parallel.towers)


def test_dev_list():
    for asked, found in (
        (2, ["/CPU:0", "/CPU:1"]),
        (["/cpu:1", "/device:CPU:2"], ["/CPU:1", "/CPU:2"]),
        (1, ["/CPU:0"]),
    ):
        assert list(mgpu.make_parallel(d0(), gpus=asked).towers) == found
    for asked in (99, ["/CPU:0", "/CPU:0"], "/CPU:77"):
        with pytest.raises(mgpu.DeviceError, match="CPU"):
            mgpu.make_parallel(d0(), gpus=asked)


def test_no_nccl():
    """The default way of combining works on CPU devices, and describe() names it."""
    plain, parallel = pair(towers=2)
    assert_same_logs(*fit_both(plain, parallel, *regression(9), batch_size=4))
    assert parallel.describe()["towers"] == ["/CPU:0", "/CPU:1"]
    assert "nccl" not in str(parallel.describe()).lower()


def test_ps_keras3():
    """A model made under a tf.distribute strategy is refused."""
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        model = d0()
    with pytest.raises(mgpu.ModelError, match=r"OneDeviceStrategy.*outside strategy.scope"):
        mgpu.make_parallel(model, gpus=gpus(2))


# ---- installation


def run_python(source, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_hvd_build(tmp_path):
    """Without Horovod, mpi4py and any other extra: import, list devices, and train on two of them."""
    out = run_python(
        """
        import sys
        for extra in ("horovod", "mpi4py", "pandas", "sklearn", "h5py.nothing"):
            sys.modules[extra] = None
        import mgpu
        assert "tensorflow" not in sys.modules, "import mgpu loads TensorFlow"
        mgpu.get_available_gpus()
        import tensorflow as tf
        # Fails once a device is initialised.
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        import keras, numpy
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model = mgpu.make_parallel(model, gpus=2)
        model.compile("sgd", "mse")
        model.fit(numpy.ones((7, 4)), numpy.ones((7, 1)), batch_size=4, verbose=0)
        print(*model.towers)
        """,
        tmp_path,
    )
    assert out.split()[-2:] == ["/CPU:0", "/CPU:1"]
