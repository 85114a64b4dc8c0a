"""Cases of users: gradients and losses are combined as one device would compute them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from mgpu import rowwise

from .support import assert_same_logs, assert_same_weights, d0, fit_both, gpus, pair, regression


def optimizers():
    """Every optimizer of this Keras, with settings at which it moves, and none that rounding can flip."""
    adam = {"learning_rate": 0.01, "epsilon": 1e-3}
    settings = {
        "SGD": {"learning_rate": 0.1, "momentum": 0.9},
        "Adadelta": {"learning_rate": 1.0, "epsilon": 1e-3},
        "Adafactor": {"learning_rate": 0.01},
        "Adagrad": {"learning_rate": 0.1},
        "Ftrl": {"learning_rate": 0.1},
        "Lion": {"learning_rate": 0.01},
        "Muon": {"learning_rate": 0.01},
        "RMSprop": adam,
        **dict.fromkeys(("Adam", "AdamW", "Adamax", "Lamb", "Nadam"), adam),
    }
    others = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # they hold other optimizers
    names = [
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer) and name not in others
    ]
    return [pytest.param(name, settings.get(name, {}), id=name) for name in sorted(names)]


@pytest.mark.parametrize("towers", [1, 2, 3, 4])
def test_grad_agg(towers):
    """One step, then four more, against the one-device run at the same global batch."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 1)).astype("float32"), rng.normal(size=(12, 10)).astype("float32")
    build = lambda: keras.Sequential([layers.Input((1,)), layers.Dense(10)])  # noqa: E731
    plain, parallel = pair(build, towers)
    kernel, bias = plain.get_weights()
    error = x @ kernel + bias - y  # one step of SGD(0.1) on mean((xw + b - y)^2), by hand
    fit_both(plain, parallel, x, y, batch_size=12)
    np.testing.assert_allclose(parallel.get_weights()[0], kernel - 0.1 * 2 * x.T @ error / 120, rtol=1e-5)
    fit_both(plain, parallel, x, y, batch_size=12, epochs=4)
    assert_same_weights(plain, parallel)


def test_grad_accum():
    """Seven batches in windows of three: weights move on the third and sixth, and one batch is left over."""
    x, y = regression(28)
    plain, parallel = pair(
        compile_args=lambda: {
            "optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
            "loss": "mse",
        }
    )
    seen = {plain: [], parallel: []}
    for model in seen:
        before = model.get_weights()

        def record(batch, logs, model=model):
            seen[model].append(model.get_weights())

        model.fit(
            x,
            y,
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=record)],
        )
        seen[model].insert(0, before)
    moved = [
        any((a != b).any() for a, b in zip(*steps, strict=True))
        for steps in zip(seen[parallel], seen[parallel][1:], strict=False)
    ]
    assert moved == [False, False, True, False, False, True, False]
    assert_same_weights(plain, parallel)
    assert int(parallel.optimizer.iterations) == int(plain.optimizer.iterations)


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_reg_xn(towers):
    """With x = 0 the loss is the weight penalty alone: it must not grow with the towers."""

    def build():
        return keras.Sequential(
            [layers.Input((4,)), layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1), use_bias=False)]
        )

    plain, parallel = pair(build, towers)
    penalty = 0.1 * np.square(plain.get_weights()[0]).sum()
    kernel = plain.get_weights()[0]
    zeros = np.zeros((8, 4), "float32"), np.zeros((8, 3), "float32")
    history = parallel.fit(*zeros, batch_size=8, verbose=0).history
    np.testing.assert_allclose(history["loss"], [penalty], rtol=1e-5)
    np.testing.assert_allclose(parallel.get_weights()[0], kernel * (1 - 0.1 * 2 * 0.1), rtol=1e-5)


class Penalty(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("rows", [8, 7])
def test_reg_xn_when_a_layer_adds_the_loss(rows):
    build = lambda: keras.Sequential([layers.Input((4,)), layers.Dense(3), Penalty(), layers.Dense(1)])  # noqa: E731
    plain, parallel = pair(build, 3)
    assert_same_logs(*fit_both(plain, parallel, *regression(rows), batch_size=rows, epochs=3))
    assert_same_weights(plain, parallel)


def squared(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def divides_by_batch(y_true, y_pred):
    """Reduces itself, as much code for one device does."""
    rows = ops.cast(ops.shape(y_true)[0], "float32")
    return ops.sum(ops.square(y_true - y_pred)) / rows


@pytest.mark.parametrize("towers", [1, 3])
@pytest.mark.parametrize("loss", ["mse", squared, rowwise(lambda t, p: squared(t, p)), divides_by_batch])
def test_loss_1_n(loss, towers):
    """Every row's loss is 9, so the printed loss is 9 on any number of towers."""

    def build():
        return keras.Sequential([layers.Input((4,)), layers.Dense(1, kernel_initializer="zeros")])

    _, parallel = pair(build, towers, compile_args=lambda: {"optimizer": keras.optimizers.SGD(0.0), "loss": loss})
    history = parallel.fit(np.zeros((13, 4)), np.full((13, 1), 3.0), batch_size=8, verbose=0).history
    np.testing.assert_allclose(history["loss"], [9.0], rtol=1e-6)


@pytest.mark.parametrize(("name", "arguments"), optimizers())
def test_opt_desync(name, arguments):
    x, y = regression(20)
    plain, parallel = pair(
        compile_args=lambda: {"optimizer": getattr(keras.optimizers, name)(**arguments), "loss": "mse"}
    )
    # Built in the first traced step, Keras' ScheduleFreeAdamW starts its copy of the weights from zero.
    plain.optimizer.build(plain.trainable_variables)
    fit_both(plain, parallel, x, y, batch_size=7, epochs=2)
    # Rules that divide by the size of the gradient amplify its rounding.
    assert_same_weights(plain, parallel, rtol=1e-4, atol=1e-5)
    assert int(parallel.optimizer.iterations) == int(plain.optimizer.iterations) == 6


@pytest.mark.parametrize(
    "home",
    ["/CPU:0", "/CPU:3", "spread", ["/CPU:1", "/CPU:2"]],
    ids=["first-tower", "elsewhere", "spread", "list"],
)
def test_sum_vs_mean(home):
    """Wherever the weights live, the same learning rate means the same step."""
    plain, parallel = pair(
        towers=2,
        ps_device=home,
        compile_args=lambda: {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": "mse"},
    )
    assert_same_logs(*fit_both(plain, parallel, *regression(19), batch_size=8, epochs=2))
    assert_same_weights(plain, parallel)


def test_agg_nan():
    """Loss, metrics and variables stay finite; counters are neither summed nor averaged."""
    rng = np.random.default_rng(0)
    x = rng.random((128, 8, 8, 1)).astype("float32")
    y = rng.integers(10, size=128)

    def build():
        return keras.Sequential(
            [layers.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dropout(0.1), layers.Dense(10)]
        )

    _, parallel = pair(
        build,
        compile_args=lambda: {
            "optimizer": "adam",
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        },
    )
    history = parallel.fit(x, y, batch_size=32, epochs=2, verbose=0).history
    assert np.isfinite([*history["loss"], *history["accuracy"]]).all()
    variables = [*parallel.variables, *parallel.optimizer.variables]
    assert all(np.isfinite(ops.convert_to_numpy(v)).all() for v in variables)
    assert int(parallel.optimizer.iterations) == 8
    (accuracy,) = [m for m in parallel.metrics if m.name != "loss"]
    counts = [float(v) for v in accuracy.variables if "count" in v.path]
    assert counts == [128.0]


def test_plain_model_and_parallel_model_share_their_weights():
    from mgpu import make_parallel

    model = d0()
    parallel = make_parallel(model, gpus=gpus(2))
    parallel.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before = model.get_weights()
    parallel.fit(*regression(8), verbose=0)
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    for a, b in zip(model.get_weights(), parallel.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
