"""Cases of users: batch statistics, random masks, repeated runs."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mgpu

from .support import assert_same_logs, assert_same_weights, d0, fit_both, gpus, pair, regression


def norm_only(**arguments):
    return keras.Sequential([layers.Input((1,)), layers.BatchNormalization(momentum=0.9, **arguments)])


def moving_statistics(batches, towers):
    """By hand: once a step, to the row-weighted mean of the towers' own statistics."""
    mean, variance = 0.0, 1.0
    for batch in batches:
        parts = [batch[len(batch) * t // towers : len(batch) * (t + 1) // towers] for t in range(towers)]
        shares = [len(part) / len(batch) for part in parts if len(part)]
        parts = [part for part in parts if len(part)]
        mean = 0.9 * mean + 0.1 * sum(s * p.mean() for s, p in zip(shares, parts, strict=True))
        variance = 0.9 * variance + 0.1 * sum(s * p.var() for s, p in zip(shares, parts, strict=True))
    return mean, variance


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize(
    ("towers", "rows"),
    [
        pytest.param(2, 8, id="even"),
        pytest.param(2, 7, id="uneven"),  # a mean over towers fails
        pytest.param(3, 3, id="one-row-each"),
        pytest.param(3, 2, id="empty-tower"),  # the variance of no rows is NaN
    ],
)
def test_bn_stats(towers, rows, steps):
    x = np.random.default_rng(0).normal(size=(rows, 1)).astype("float32")
    x[rows // towers :] += 10  # the first tower's mean is 0, the others' 10
    _, parallel = pair(norm_only, towers)
    parallel.fit(np.tile(x, (steps, 1)), np.tile(x, (steps, 1)), batch_size=rows, shuffle=False, verbose=0)
    mean, variance = moving_statistics([x] * steps, towers)
    (norm,) = parallel.layers
    np.testing.assert_allclose(norm.moving_mean, [mean], rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, [variance], rtol=1e-4)  # E[x^2] - E[x]^2 cancels
    gamma, beta = (ops.convert_to_numpy(v) for v in (norm.gamma, norm.beta))
    expected = (x - mean) / np.sqrt(variance + norm.epsilon) * gamma + beta
    np.testing.assert_allclose(parallel.predict(x, verbose=0), expected, rtol=1e-3, atol=1e-4)


def test_bn_stats_stay_when_frozen():
    def build():
        model = norm_only()
        model.layers[0].trainable = False
        return keras.Sequential([layers.Input((1,)), layers.Dense(1), model])

    x = np.random.default_rng(0).normal(5, 1, size=(8, 1)).astype("float32")
    plain, parallel = pair(build, 2)
    fit_both(plain, parallel, x, x, batch_size=8)
    assert_same_weights(plain, parallel)
    assert [float(ops.squeeze(v)) for v in parallel.non_trainable_variables][-2:] == [0.0, 1.0]


@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_sync_bn(rows, towers):
    def build():
        return keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(3),
                layers.BatchNormalization(momentum=0.9, synchronized=True),
                layers.Dense(1),
            ]
        )

    plain, parallel = pair(build, towers)
    x, y = regression(rows)
    assert_same_logs(*fit_both(plain, parallel, x + 1, y, batch_size=rows, epochs=3), rtol=1e-4)
    assert_same_weights(plain, parallel, rtol=1e-4, atol=1e-5)  # E[x^2] - E[x]^2 cancels


def test_sync_bn_when_half_precision():
    def build():
        return keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(3, dtype="mixed_float16"),
                layers.BatchNormalization(momentum=0.9, synchronized=True, dtype="mixed_float16"),
                layers.Dense(1, dtype="float32"),
            ]
        )

    plain, parallel = pair(build, 2)
    assert_same_logs(*fit_both(plain, parallel, *regression(8), batch_size=8, epochs=2), rtol=2e-2)
    assert_same_weights(plain, parallel, rtol=2e-2, atol=2e-3)  # float16 rounds at 5e-4


def noisy():
    return keras.Sequential(
        [
            layers.Input((4, 4, 1)),
            layers.RandomFlip(seed=3),
            layers.GaussianNoise(0.1),
            layers.Flatten(),
            layers.Dense(4),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )


def test_dropout_seed(tmp_path):
    """Builds, trains, saves, and the saved model loads and predicts alike."""
    x = np.random.default_rng(0).normal(size=(10, 4, 4, 1)).astype("float32")
    _, parallel = pair(noisy, 2)
    parallel.fit(x, x[:, 0, 0], batch_size=4, verbose=0)
    parallel.save(tmp_path / "noisy.keras")
    loaded = keras.models.load_model(tmp_path / "noisy.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), parallel.predict(x, verbose=0), rtol=1e-6)
    assert len(loaded.weights) == len(parallel.weights)


def drawn_masks(ids, towers):
    """Return the dropout mask of each row: with the summed output as loss it is the table's gradient."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((), dtype="int32"), layers.Embedding(8, 50, "ones"), layers.Dropout(0.5)])
    parallel = mgpu.make_parallel(model, gpus=gpus(towers)) if towers else model
    summed = mgpu.rowwise(lambda y_true, y_pred: ops.sum(y_pred, axis=-1))
    parallel.compile(keras.optimizers.SGD(1.0), summed, jit_compile=False)
    parallel.fit(ids, np.zeros(len(ids)), batch_size=len(ids), shuffle=False, verbose=0)
    return model.get_weights()[0] != 1.0  # (8, 50): where the gradient got through


def test_same_mask():
    ids = np.arange(8)
    masks = drawn_masks(ids, 2)
    assert 0.3 < masks.mean() < 0.7
    assert (masks[:4] != masks[4:]).any(), "both towers drew the same mask"
    np.testing.assert_array_equal(drawn_masks(ids, 2), masks, err_msg="not the same on each run")
    plain = drawn_masks(ids[:4], 0)
    np.testing.assert_array_equal(masks[:4], plain[:4], err_msg="tower 0 does not draw as the plain model")


def test_same_mask_when_steps_follow():
    """Masks change from step to step: the seed moves on once."""
    x = np.ones((16, 4), "float32")
    build = lambda: keras.Sequential([layers.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])  # noqa: E731
    plain, parallel = pair(build, 2)
    fit_both(plain, parallel, x, x[:, :1], batch_size=4)
    seeds = [[ops.convert_to_numpy(v) for v in model.non_trainable_variables] for model in (plain, parallel)]
    np.testing.assert_array_equal(seeds[1], seeds[0])


def with_dropout():
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(6, activation="relu"), layers.Dropout(0.5), layers.Dense(1)]
    )


def test_repro():
    """Two runs with the same seed and towers are equal to the last bit."""
    x, y = regression(22)
    runs = []
    for _ in range(2):
        _, parallel = pair(with_dropout, 2)
        runs.append((parallel.fit(x, y, batch_size=8, epochs=2, verbose=0).history, parallel.get_weights()))
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_repro_when_the_towers_differ():
    x, y = regression(22)
    results = []
    for towers in (1, 2, 3, 4):
        _, parallel = pair(d0, towers)
        parallel.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        results.append(parallel.get_weights())
    for weights in results[1:]:
        for a, b in zip(results[0], weights, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
