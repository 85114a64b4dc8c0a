"""The learning rate of every batch against the paper's formula, and momentum against SGD written by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu.callbacks import LearningRateSchedule, LearningRateWarmup
from mgpu.errors import ModelError

X = np.arange(12, dtype="float32").reshape(6, 2) / 10
Y = X[:, :1]
STEPS = 3  # of 2 rows


def compiled(optimizer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse")
    return model


def rates(model, callback, *, epochs=8, initial_epoch=0, before=()):
    """Return the learning rate that each batch was computed with."""
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate))
    )
    model.fit(
        *(X, Y),
        batch_size=2,
        epochs=epochs,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=[*before, callback, look],
    )
    return seen


def warmed(target, size=4, epochs=5, count=8 * STEPS):
    return [target * (1 / size + (1 - 1 / size) * min(1, k / (epochs * STEPS))) for k in range(count)]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("scale", "target"), [(None, 0.1), ("size", 0.4), (2, 0.2)])
def test_warmup_follows_the_formula_in_every_batch(optimizer, scale, target, ranks):
    ranks(0, 4)
    expected = warmed(target, size=2 if scale == 2 else 4)
    np.testing.assert_allclose(rates(compiled(optimizer()), LearningRateWarmup(scale=scale)), expected, rtol=1e-6)


@pytest.mark.parametrize("first", [3, 7])
def test_warmup_depends_on_the_epoch_not_on_calls_seen(first, ranks):
    ranks(0, 4)
    got = rates(compiled(OPTIMIZERS["sgd"]()), LearningRateWarmup(scale="size"), initial_epoch=first)
    np.testing.assert_allclose(got, warmed(0.4)[first * STEPS :], rtol=1e-6)


def test_a_second_fit_is_not_scaled_again(ranks):
    ranks(0, 4)
    model = compiled(OPTIMIZERS["sgd"]())
    got = rates(model, LearningRateWarmup(scale="size"), epochs=3)
    got += rates(model, LearningRateWarmup(scale="size"), epochs=8, initial_epoch=3)
    np.testing.assert_allclose(got, warmed(0.4), rtol=1e-6)


def test_a_restored_run_ends_as_a_straight_one(ranks, tmp_path):
    """Catches a velocity corrected twice or not at all at the seam, and a rate scaled twice."""
    ranks(0, 4)
    straight, first, resumed = (compiled(OPTIMIZERS["momentum"]()) for _ in range(3))
    for model in (first, resumed):
        model.set_weights(straight.get_weights())
    rates(straight, LearningRateWarmup(scale="size"))
    rates(first, LearningRateWarmup(scale="size"), epochs=3)
    first.save_weights(tmp_path / "a.weights.h5")
    resumed.optimizer.build(resumed.trainable_variables)
    resumed.load_weights(tmp_path / "a.weights.h5")
    got = rates(resumed, LearningRateWarmup(scale="size", learning_rate=0.1), initial_epoch=3)
    np.testing.assert_allclose(got, warmed(0.4)[3 * STEPS :], rtol=1e-6)
    np.testing.assert_allclose(resumed.get_weights()[0], straight.get_weights()[0], rtol=1e-6)


def test_a_loaded_rate_of_unknown_origin_is_refused(ranks):
    ranks(0, 4)
    model = compiled(OPTIMIZERS["sgd"]())
    model.fit(X, Y, verbose=0)
    with pytest.raises(ModelError, match=r"LearningRateWarmup\(\.\.\., learning_rate=0\.1\)"):
        rates(model, LearningRateWarmup(scale="size"))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_momentum_is_that_of_the_papers_equation_nine(nesterov, corrected, ranks):
    """u = m * u + g, w = w - lr * u, where u has no learning rate in it. Uncorrected, it has to differ."""
    ranks(0, 4)
    model = compiled(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov))
    weights, u = model.get_weights()[0].astype("float64"), 0
    rates(model, LearningRateWarmup(3, momentum_correction=corrected), epochs=4)
    for step, rate in enumerate(warmed(0.1, epochs=3, count=4 * STEPS)):
        rows = slice(2 * (step % STEPS), 2 * (step % STEPS) + 2)
        gradient = X[rows].T @ (X[rows] @ weights - Y[rows])
        u = 0.9 * u + gradient
        weights = weights - rate * (0.9 * u + gradient if nesterov else u)
    difference = abs(weights - model.get_weights()[0]).max()
    assert difference < 2e-6 if corrected else difference > 1e-3  # float32 over 12 steps


SCHEDULES = {
    "function": (lambda at: 0.1 / (1 + at), [0.1 / (1 + k / STEPS) for k in range(6)]),
    "dict": ({0: 0.1, 1: 0.01}, [0.1] * 3 + [0.01] * 3),
    "keras": (keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), [0.1 * 0.5 ** (k / 2) for k in range(6)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("first", [0, 1])
def test_schedule_gives_the_rate_of_each_batch(name, first, ranks):
    schedule, expected = SCHEDULES[name]
    got = rates(compiled("sgd"), LearningRateSchedule(schedule), epochs=2, initial_epoch=first)
    np.testing.assert_allclose(got, expected[first * STEPS :], rtol=1e-6)


def test_an_optimizer_with_a_schedule_is_refused(ranks):
    model = compiled(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    with pytest.raises(ModelError, match=r"callbacks=\[mgpu\.callbacks\.LearningRateSchedule\(ExponentialDecay"):
        rates(model, LearningRateWarmup())


REFUSED = {
    "scale": (lambda: LearningRateWarmup(scale="ranks"), r"LearningRateWarmup\(\.\.\., scale='size'\)"),
    "epochs": (lambda: LearningRateWarmup(0), r"LearningRateWarmup\(epochs=5\)"),
    "schedule": (lambda: LearningRateSchedule({30: 0.1}), r"LearningRateSchedule\(\{0: 0\.1, 30: 0\.01\}\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_out_of_range_are_refused(name, ranks):
    make, remedy = REFUSED[name]
    with pytest.raises(ModelError, match=remedy):
        make()


def test_an_epoch_of_unknown_length_is_refused_and_its_remedy_works(ranks):
    ranks(0, 4)
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).repeat()
    unknown = endless.take(STEPS).filter(lambda x, y: True)
    with pytest.raises(ModelError, match=r"LearningRateWarmup\(\.\.\., steps_per_epoch=100\)"):
        compiled("sgd").fit(unknown, shuffle=False, verbose=0, callbacks=[LearningRateWarmup()])
    callback = LearningRateWarmup(steps_per_epoch=STEPS)
    model = compiled("sgd")
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate))
    )
    model.fit(endless, steps_per_epoch=STEPS, shuffle=False, verbose=0, callbacks=[callback, look])
    np.testing.assert_allclose(seen, warmed(0.01, count=STEPS), rtol=1e-6)
