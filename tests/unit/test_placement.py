import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu import make_parallel
from mgpu.data.split import layout_of
from mgpu.errors import ModelError
from mgpu.placement import build, build_optimizer, devices_of, move, refuse_scattered, short, sizes_bytes

# Sums of float32 in another order, carried through a few steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def dense(*, units=3):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(1)])


def home_of(variable):
    return short(variable.value.device)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("/job:localhost/replica:0/task:0/device:GPU:3", "/GPU:3"),
        ("/job:localhost/replica:0/task:0/device:CPU:0", "/CPU:0"),
        ("/device:CPU:2", "/CPU:2"),
        ("/GPU:1", "/GPU:1"),
        ("cpu:1", "/CPU:1"),
        ("", "/CPU:0"),
    ],
)
def test_short_names_keep_kind_and_number(device, name):
    assert short(device) == name


def test_sizes_are_in_bytes():
    variables = [
        keras.Variable(np.zeros((3, 2), "float32")),
        keras.Variable(np.zeros(5, "float16"), dtype="float16"),
        keras.Variable(0, dtype="int64"),
        keras.Variable(np.zeros((0, 4), "float32")),
    ]
    assert sizes_bytes(variables) == [24, 10, 8, 0]


def test_variables_move_in_place_and_keep_value_and_kind():
    model = dense()
    kernel = model.layers[0].kernel
    before = [np.array(v) for v in model.weights]
    homes = ["/CPU:1", "/CPU:2", "/CPU:3", "/CPU:0"]
    assert move(model.variables, homes)
    assert model.layers[0].kernel is kernel  # whoever holds the Keras variable sees it at its new place
    assert [home_of(v) for v in model.variables] == homes
    assert devices_of(model.variables) == ["/CPU:0", "/CPU:1", "/CPU:2", "/CPU:3"]
    for old, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(variable, old)
    assert [v.value.trainable for v in model.variables] == [True] * 4
    assert len(model.trainable_variables) == 4


def test_a_variable_that_is_not_trainable_stays_so():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    move(layer.variables, ["/CPU:1"] * 4)
    assert [v.value.trainable for v in layer.variables] == [True, True, False, False]
    assert len(layer.trainable_variables) == 2


def test_a_variable_at_home_is_left_alone():
    model = dense()
    inner = [v.value for v in model.variables]
    assert not move(model.variables, ["/CPU:0"] * 4)
    assert all(v.value is old for v, old in zip(model.variables, inner, strict=True))
    move(model.variables, ["/CPU:1"] * 4)
    assert not move(model.variables, ["/device:CPU:1"] * 4)  # the same device in another spelling


def test_slots_are_built_beside_their_variables():
    model = dense()
    homes = ["/CPU:1", "/CPU:2", "/CPU:3", "/CPU:0"]
    move(model.variables, homes)
    optimizer = keras.optimizers.Adam()
    build_optimizer(optimizer, model.trainable_variables)
    for slots in (optimizer._momentums, optimizer._velocities):
        assert [home_of(slot) for slot in slots] == homes


def test_slots_follow_variables_that_moved():
    model = dense()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(np.full((4, 3), 7.0))
    homes = ["/CPU:1", "/CPU:2", "/CPU:3", "/CPU:0"]
    move(model.variables, homes)
    assert build_optimizer(optimizer, model.trainable_variables)
    assert [home_of(slot) for slot in optimizer.momentums] == homes
    np.testing.assert_array_equal(optimizer.momentums[0], np.full((4, 3), 7.0))
    assert not build_optimizer(optimizer, model.trainable_variables)  # all are at home now


def test_slots_of_layers_with_names_inside_each_other_keep_apart():
    """ "my_dense" ends in "dense": a slot must go with the longer name."""
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(2, name=name)(inputs) for name in ("dense", "my_dense", "dense_1")]
    model = keras.Model(inputs, outputs)
    homes = ["/CPU:1", "/CPU:1", "/CPU:2", "/CPU:2", "/CPU:3", "/CPU:3"]
    move(model.variables, homes)
    optimizer = keras.optimizers.SGD(momentum=0.9)
    build_optimizer(optimizer, model.trainable_variables)
    assert [home_of(slot) for slot in optimizer.momentums] == homes


def test_no_optimizer_and_nothing_to_train_need_no_slots():
    assert not build_optimizer(None, dense().trainable_variables)
    assert not build_optimizer(keras.optimizers.Adam(), [])


def trained(make_optimizer, *, parallel_args=None):
    """Train 4 steps in Keras, 4 more in Keras or on two towers; return the weights."""
    keras.utils.set_random_seed(0)
    model = dense()
    model.compile(make_optimizer(), "mse", jit_compile=False)
    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(X, Y, **fit)
    if parallel_args is not None:
        model = make_parallel(model, ["/CPU:0", "/CPU:1"], **parallel_args)
    model.fit(X, Y, **fit)
    return model


@pytest.mark.parametrize("ps_device", ["/CPU:2", "spread"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda: keras.optimizers.SGD(0.1), id="sgd"),
        pytest.param(lambda: keras.optimizers.Adam(0.05, amsgrad=True), id="adam"),
    ],
)
def test_a_trained_model_goes_on_from_where_it_was(make_optimizer, ps_device):
    expected = trained(make_optimizer)
    moved = trained(make_optimizer, parallel_args={"ps_device": ps_device})
    homes = set(devices_of(moved.variables))
    assert homes == ({"/CPU:2"} if ps_device != "spread" else {"/CPU:0", "/CPU:1"})
    for a, b in zip(expected.weights, moved.weights, strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)
    assert int(moved.optimizer.iterations) == 8


def test_the_plain_model_trains_on_after_its_weights_have_moved():
    expected = trained(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    model = dense()
    model.set_weights(expected.get_weights())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    model.train_on_batch(X, Y)
    make_parallel(model, ["/CPU:0", "/CPU:1"], ps_device="/CPU:3")  # a view that is not even used
    model.train_on_batch(X, Y)
    expected.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    for _ in range(2):
        expected.train_on_batch(X, Y)
    for a, b in zip(expected.weights, model.weights, strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)


class Lazy(keras.Model):
    """Has no weights before its first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


def test_build_makes_all_that_training_needs():
    model = Lazy()
    model.compile("adam", "mse", metrics=["mae"])
    build(model, layout_of((X, Y)))
    assert [tuple(v.shape) for v in model.variables if "dense" in v.path] == [(4, 3), (3,), (3, 1), (1,)]
    assert model._compile_loss.built
    assert model._compile_metrics.built


def test_build_computes_nothing():
    model = dense()
    model.compile("sgd", "mse", metrics=["mae"])
    before = model.get_weights()
    build(model, layout_of((X, Y, np.ones(8, "float32"))))
    assert [float(m.result()) for m in model._compile_metrics.metrics] == [0.0]
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_build_for_prediction_needs_no_compile():
    model = Lazy()
    build(model, layout_of((X,)))
    assert len(model.weights) == 4


def scattered():
    with tf.device("/CPU:1"):
        first = keras.layers.Dense(3, name="far")
        first.build((None, 4))
    return keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1, name="near")])


def test_weights_on_several_devices_are_refused():
    with pytest.raises(ModelError) as raised:
        make_parallel(scattered(), ["/CPU:0", "/CPU:1"])
    message = str(raised.value)
    assert "with its weights on 2 devices" in message
    assert "far/kernel' on /CPU:1" in message
    assert "near/kernel' on /CPU:0" in message
    assert "pass ps_device='/CPU:0'; to divide them by bytes, ps_device='spread'" in message


@pytest.mark.parametrize(("ps_device", "homes"), [("/CPU:0", ["/CPU:0"]), ("spread", ["/CPU:0", "/CPU:1"])])
def test_the_remedies_for_scattered_weights_work(ps_device, homes):
    model = make_parallel(scattered(), ["/CPU:0", "/CPU:1"], ps_device=ps_device)
    assert model.describe()["variables_on"] == homes


def test_weights_on_one_device_are_not_scattered():
    refuse_scattered(dense(), "auto")
    refuse_scattered(Lazy(), "auto")  # none yet
    refuse_scattered(keras.Sequential([keras.layers.Dense(1)]), "auto")


def test_a_model_spread_by_one_view_is_taken_by_the_next():
    """Weights that mgpu itself spread were not put there on purpose."""
    model = dense()
    make_parallel(model, ["/CPU:0", "/CPU:1"], ps_device="spread")
    again = make_parallel(model, ["/CPU:0", "/CPU:1"])
    assert again.describe()["variables_on"] == ["/CPU:0"]
