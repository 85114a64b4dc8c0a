"""The model that make_parallel() returns is the plain model, computed differently: there is one, seen twice."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu
from mgpu import make_parallel
from mgpu.placement import devices_of

TWO = ["/CPU:0", "/CPU:1"]
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
# Sums of float32 in another order, carried through a few steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
QUIET = {"batch_size": 4, "shuffle": False, "verbose": 0}


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")], name="plain")


def pair(towers=TWO, **kwargs):
    plain = dense()
    return plain, make_parallel(plain, towers, **kwargs)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def by_hand(steps, *, kernel, bias, learning_rate=0.1, beta=0.9):
    """Train the linear model in NumPy on batches of 4, momentum 0.9; return kernel and bias."""
    kernel, bias = kernel.astype("float64"), bias.astype("float64")
    moments = [np.zeros_like(kernel), np.zeros_like(bias)]
    for step in range(steps):
        rows = slice(0, 4) if step % 2 == 0 else slice(4, 8)
        error = X[rows] @ kernel + bias - Y[rows]
        for i, gradient in enumerate((2 * X[rows].T @ error / 4, 2 * error.mean(0))):
            moments[i] = beta * moments[i] - learning_rate * gradient
        kernel, bias = kernel + moments[0], bias + moments[1]
    return kernel, bias


def start(model):
    kernel, bias = model.get_weights()
    return {"kernel": kernel, "bias": bias}


def assert_weights(model, expected):
    for value, by_hand_value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, by_hand_value, **CLOSE)


# ---- one model, seen twice


def test_the_view_has_the_class_of_the_model():
    class Mine(keras.Model):
        pass

    inputs = keras.Input((4,))
    for plain in (dense(), Mine(inputs, keras.layers.Dense(1)(inputs)), keras.Model(inputs, inputs)):
        view = make_parallel(plain, TWO)
        assert isinstance(view, type(plain))
        assert view.__class__ is type(plain)
        assert type(view).__name__ == type(plain).__name__


def test_layers_weights_and_optimizer_are_the_same_objects():
    plain, view = pair()
    view.compile(momentum(), "mse")
    assert view.plain_model is plain
    assert view.layers == plain.layers
    assert view.get_layer("only") is plain.get_layer("only")
    assert view.optimizer is plain.optimizer
    assert [id(v) for v in view.variables] == [id(v) for v in plain.variables]
    assert (view.name, view.built, view.compiled) == (plain.name, True, True)
    assert view.count_params() == 5


@pytest.mark.parametrize(("compiled", "first"), [("plain", "view"), ("view", "plain"), ("plain", "plain")])
def test_training_by_turns_is_one_training(compiled, first):
    """Compiled through either, trained by one and then the other: 4 steps of one optimizer, by hand in NumPy."""
    plain, view = pair()
    expected = by_hand(4, **start(plain))
    (plain if compiled == "plain" else view).compile(momentum(), "mse", jit_compile=False)
    for model in (plain, view) if first == "plain" else (view, plain):
        model.fit(X, Y, **QUIET)
    assert int(plain.optimizer.iterations) == 4
    assert_weights(plain, expected)
    assert_weights(view, expected)


def test_compiling_the_plain_model_again_is_noticed_by_the_view():
    plain, view = pair()
    view.compile(keras.optimizers.SGD(5.0), "mae", jit_compile=False)
    view.train_on_batch(X, Y)
    plain.compile(momentum(), "mse", metrics=["mae"], jit_compile=False)
    expected = by_hand(2, **start(plain))
    history = view.fit(X, Y, **QUIET).history
    assert set(history) == {"loss", "mae"}
    assert_weights(plain, expected)


def test_two_views_of_one_model_with_different_towers_train_by_turns():
    plain = dense()
    expected = by_hand(6, **start(plain))
    views = [
        make_parallel(plain, towers, strategy=mgpu.ParameterServer("/CPU:0"))
        for towers in (TWO, ["/CPU:2", "/CPU:3", "/CPU:1"])
    ]
    assert [view.towers for view in views] == [("/CPU:0", "/CPU:1"), ("/CPU:2", "/CPU:3", "/CPU:1")]
    plain.compile(momentum(), "mse", jit_compile=False)
    for view in (views[0], views[1], views[0]):
        view.fit(X, Y, **QUIET)
    assert_weights(plain, expected)


def test_a_view_trains_the_model_after_another_view_moved_its_weights():
    """The second view's towers are elsewhere, and so are its weights: what the first has traced is void."""
    plain = dense()
    expected = by_hand(6, **start(plain))
    first = make_parallel(plain, TWO)
    plain.compile(momentum(), "mse", jit_compile=False)
    first.fit(X, Y, **QUIET)
    second = make_parallel(plain, ["/CPU:2", "/CPU:3"])
    for view in (second, first):
        view.fit(X, Y, **QUIET)
    assert_weights(plain, expected)


def test_a_parallel_model_made_parallel_is_a_view_of_the_plain_model():
    plain, view = pair()
    again = make_parallel(view, ["/CPU:0", "/CPU:1", "/CPU:2"])
    assert again.plain_model is plain
    assert len(again.towers) == 3
    assert len(view.towers) == 2  # the first view stays as it is
    assert again.__class__ is type(plain)


def test_stop_training_is_shared():
    plain, view = pair()
    view.compile("sgd", "mse", jit_compile=False)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            (plain if epoch == 1 else view).stop_training = epoch == 1

    assert len(view.fit(X, Y, epochs=9, callbacks=[Stop()], **QUIET).history["loss"]) == 2
    assert view.stop_training
    assert plain.stop_training


def test_early_stopping_restores_the_weights():
    plain, view = pair()
    view.compile(keras.optimizers.SGD(50.0), "mse", jit_compile=False)  # diverges
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
    history = view.fit(X, Y, epochs=9, callbacks=[stop], **QUIET).history
    assert len(history["loss"]) == 2
    assert np.isfinite(plain.get_weights()[0]).all()


@pytest.mark.parametrize("through", ["plain", "view"])
def test_freezing_and_compiling_again_changes_what_is_trained(through):
    plain, view = pair()
    toggled = plain if through == "plain" else view
    view.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    view.fit(X, Y, **QUIET)

    layer = toggled.get_layer("only")
    layer.trainable = False
    toggled.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before = plain.get_weights()
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        view.fit(X, Y, **QUIET)
    for a, b in zip(before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)

    layer.trainable = True
    toggled.compile(momentum(), "mse", jit_compile=False)
    expected = by_hand(2, **start(plain))
    view.fit(X, Y, **QUIET)
    assert_weights(plain, expected)


def test_the_view_is_called_like_a_layer():
    plain, view = pair()
    np.testing.assert_array_equal(view(X), plain(X))
    outer = keras.Sequential([keras.Input((4,)), view])
    np.testing.assert_array_equal(outer(X), plain(X))


# ---- saved, copied, printed as the plain model


@pytest.fixture(scope="module")
def trained():
    keras.utils.set_random_seed(0)
    plain, view = pair()
    view.compile(momentum(), "mse", jit_compile=False)
    view.fit(X, Y, **QUIET)
    return plain, view


def assert_plain_copy(copied, plain):
    assert type(copied) is type(plain)
    assert not isinstance(copied, mgpu.parallel.ParallelModel)
    assert_weights(copied, plain.get_weights())


@pytest.mark.parametrize("save", ["method", "keras.saving"])
def test_saved_models_load_as_plain_models_and_train_on(trained, tmp_path, save):
    plain, view = trained
    path = tmp_path / "model.keras"
    if save == "method":
        view.save(path)
    else:
        keras.saving.save_model(view, path)
    loaded = keras.saving.load_model(path)
    assert_plain_copy(loaded, plain)
    assert int(loaded.optimizer.iterations) == int(plain.optimizer.iterations) == 2
    for a, b in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)


def test_saved_weights_load_into_either(trained, tmp_path):
    plain, view = trained
    view.save_weights(tmp_path / "w.weights.h5")
    other, other_view = pair()
    other.load_weights(tmp_path / "w.weights.h5")
    assert_weights(other, plain.get_weights())
    other.set_weights([np.zeros_like(w) for w in other.get_weights()])
    other_view.load_weights(tmp_path / "w.weights.h5")
    assert_weights(other, plain.get_weights())


def test_an_exported_model_predicts_the_same(trained, tmp_path):
    plain, view = trained
    try:
        view.export(str(tmp_path / "exported"), verbose=False)
    except TypeError:
        view.export(str(tmp_path / "exported"))  # Keras 3.6
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(X), plain(X), **CLOSE)


@pytest.mark.parametrize(
    "copy_of",
    [
        pytest.param(lambda view: pickle.loads(pickle.dumps(view)), id="pickle"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(copy.copy, id="copy"),
    ],
)
def test_copies_are_plain_models(trained, copy_of):
    plain, view = trained
    copied = copy_of(view)
    assert_plain_copy(copied, plain)
    assert copied.layers[0] is not plain.layers[0]


def test_clones_are_plain_models_with_new_weights(trained):
    plain, view = trained
    clone = keras.models.clone_model(view)
    assert type(clone) is type(plain)
    assert [v.path for v in clone.weights] == [v.path for v in plain.weights]
    assert np.any(clone.get_weights()[0] != plain.get_weights()[0])


def test_the_json_of_the_view_is_that_of_the_plain_model(trained):
    plain, view = trained
    assert view.to_json() == plain.to_json()
    assert view.get_config() == plain.get_config()
    assert type(keras.models.model_from_json(view.to_json())) is type(plain)


def test_the_summary_of_the_view_is_that_of_the_plain_model(trained):
    def summary(model):
        lines = []
        model.summary(print_fn=lambda line, **kwargs: lines.append(line))
        return "\n".join(lines)

    plain, view = trained
    assert summary(view) == summary(plain)
    assert "only (Dense)" in summary(view)


def test_a_checkpoint_callback_writes_a_plain_model(tmp_path):
    plain, view = pair()
    view.compile(momentum(), "mse", jit_compile=False)
    path = str(tmp_path / "best.keras")
    view.fit(X, Y, callbacks=[keras.callbacks.ModelCheckpoint(path)], **QUIET)
    assert_plain_copy(keras.saving.load_model(path), plain)


def test_a_copied_view_trains_apart_from_its_original(trained):
    plain, view = trained
    before = plain.get_weights()
    copied = make_parallel(copy.deepcopy(view), TWO)
    copied.fit(X, Y, **QUIET)
    assert_weights(plain, before)
    assert np.any(copied.get_weights()[0] != before[0])


# ---- traced once


class Counting(keras.layers.Layer):
    """Counts how often Python runs its call, which is once for each trace."""

    calls = 0

    def call(self, x):
        type(self).calls += 1
        return x


@pytest.mark.parametrize(("towers", "depth"), [(1, 1), (2, 0), (3, 1)])
def test_a_step_is_traced_once_whatever_the_batch_sizes(towers, depth):
    plain = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])
    view = make_parallel(plain, [f"/CPU:{t}" for t in range(towers)], staging_depth=depth)
    view.compile("sgd", "mse", jit_compile=False)
    counts = []

    class Count(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            counts.append(Counting.calls)

        def on_epoch_end(self, epoch, logs=None):
            counts.append(Counting.calls)

    Counting.calls = 0
    view.fit(X[:7], Y[:7], epochs=3, callbacks=[Count()], **{**QUIET, "batch_size": 3})  # 3, 3, 1 rows
    first_epoch = counts[1]
    # Not one for each tower: building, tracing, and finding out what the model is like.
    assert 1 <= first_epoch <= 3
    assert counts[1:] == [first_epoch] * 5
    view.fit(X, Y, **{**QUIET, "batch_size": 5})  # other sizes, another call of fit
    assert Counting.calls == first_epoch


def test_the_number_of_traces_does_not_grow_with_towers():
    calls = []
    for towers in (2, 4):
        plain = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])
        view = make_parallel(plain, [f"/CPU:{t}" for t in range(towers)])
        view.compile("sgd", "mse", jit_compile=False)
        Counting.calls = 0
        view.train_on_batch(X, Y)
        calls.append(Counting.calls)
    assert calls[0] == calls[1]


# ---- what it tells about itself


def test_describe_tells_what_was_asked_for():
    _, view = pair(ps_device="/CPU:2", staging_depth=3)
    told = view.describe()
    assert told["towers"] == TWO
    assert told["strategy"] == "parameter_server"
    assert told["variables_on"] == ["/CPU:2"]
    assert told["staging_depth"] == 3
    assert told["staged_bytes_per_row"] is None  # not known before the first batch


def test_describe_tells_the_bytes_of_a_row_once_known():
    _, view = pair()
    view.compile("sgd", "mse", jit_compile=False)
    view.test_on_batch(X, Y)
    assert view.describe()["staged_bytes_per_row"] == 4 * 4 + 4


def test_one_tower_needs_no_combining():
    plain, view = pair(["/CPU:1"])
    assert view.describe()["strategy"] == "single"
    assert devices_of(plain.variables) == ["/CPU:1"]


def test_a_model_without_weights_yet_gets_them_at_home():
    plain = keras.Sequential([keras.layers.Dense(1)])
    view = make_parallel(plain, TWO, ps_device="/CPU:3")
    view.compile(momentum(), "mse", jit_compile=False)
    view.train_on_batch(X, Y)
    assert devices_of(plain.variables) == ["/CPU:3"]
    assert devices_of(plain.optimizer.momentums) == ["/CPU:3"]
