"""Each refusal of make_parallel(), with the remedy that its message names; and that the remedy works."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu
from mgpu import checks, make_parallel
from mgpu.errors import DeviceError, MgpuError, ModelError, StrategyError

TWO = ["/CPU:0", "/CPU:1"]


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="plain")


@pytest.mark.parametrize(
    ("thing", "kind"),
    [
        pytest.param(keras.layers.Dense(1), "Dense", id="layer"),
        pytest.param(dense, "function", id="function"),
        pytest.param(keras.Model, "type", id="class"),
        pytest.param(None, "NoneType", id="none"),
        pytest.param([keras.layers.Dense(1)], "list", id="list"),
    ],
)
def test_what_is_no_model_is_refused(thing, kind):
    with pytest.raises(ModelError, match=rf"needs a keras.Model; it got .* of type {kind}\. If it is a layer") as error:
        make_parallel(thing, TWO)
    assert "keras.Sequential([keras.Input(shape), layer])" in str(error.value)


def test_the_remedy_for_a_layer_works():
    layer, shape = keras.layers.Dense(1), (4,)
    make_parallel(keras.Sequential([keras.Input(shape), layer]), TWO)


@pytest.mark.parametrize("when", ["made", "passed"])
def test_a_model_under_a_distribution_strategy_is_refused(when):
    scope = tf.distribute.OneDeviceStrategy("/CPU:0").scope()
    match = r"the model 'plain' under OneDeviceStrategy; both would split.*outside strategy\.scope\(\)"
    if when == "made":
        with scope:
            model = dense()
        with pytest.raises(ModelError, match=match):
            make_parallel(model, TWO)
    else:
        model = dense()
        with scope, pytest.raises(ModelError, match=match):
            make_parallel(model, TWO)
        make_parallel(model, TWO)


def stateful():
    inputs = keras.Input(batch_shape=(4, 3, 2))
    return keras.Model(inputs, keras.layers.LSTM(2, stateful=True, name="memory")(inputs))


def test_stateful_layers_are_refused():
    with pytest.raises(ModelError, match=r"asked for 2 towers; the layer 'memory' \(LSTM\) is stateful.*") as error:
        make_parallel(stateful(), TWO)
    assert "Build it with stateful=False, or pass gpus=1." in str(error.value)


def test_an_input_of_fixed_batch_size_is_refused():
    inputs = keras.Input(batch_shape=(8, 4), name="image")
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    with pytest.raises(ModelError, match=r"asked for 2 towers; the input 'image' has the fixed batch size 8") as error:
        make_parallel(model, TWO)
    assert "Write Input(shape=(4,)) in the place of batch_shape, or pass gpus=1." in str(error.value)


class OwnTrainStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnTestStep(keras.Model):
    def test_step(self, data):
        return super().test_step(data)


class OwnTrainFunction(keras.Model):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


class OwnPredictStep(keras.Model):
    def predict_step(self, data):
        return super().predict_step(data)


def model_of(cls):
    inputs = keras.Input((4,))
    return cls(inputs, keras.layers.Dense(1)(inputs))


@pytest.mark.parametrize(
    ("cls", "method"),
    [(OwnTrainStep, "train_step"), (OwnTestStep, "test_step"), (OwnTrainFunction, "make_train_function")],
)
def test_own_steps_are_refused(cls, method):
    with pytest.raises(ModelError, match=rf"2 towers; {cls.__name__} overrides {method}\(\), which") as error:
        make_parallel(model_of(cls), TWO)
    assert "Override compute_loss() and compute_metrics() instead, or pass gpus=1" in str(error.value)


@pytest.mark.parametrize(
    "make", [stateful, lambda: model_of(OwnTrainStep), lambda: model_of(OwnTestStep)], ids=["stateful", "train", "test"]
)
def test_one_tower_takes_what_several_refuse(make):
    """The remedy "gpus=1" of the messages."""
    assert make_parallel(make(), ["/CPU:0"]).towers == ("/CPU:0",)


def test_an_own_predict_step_is_taken():
    assert make_parallel(model_of(OwnPredictStep), TWO).towers == tuple(TWO)


class Memory(keras.layers.Dense):
    stateful = True


class Late(keras.Model):
    """Makes its stateful layer when it is first called."""

    def build(self, shape):
        self.memory = Memory(1, name="memory")
        self.memory.build(shape)
        self.built = True

    def call(self, x):
        return self.memory(x)


def test_a_layer_made_by_the_first_batch_is_looked_at_then():
    model = make_parallel(Late(), TWO)
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ModelError, match=r"'memory' \(Memory\) is stateful"):
        model.train_on_batch(np.zeros((4, 4), "float32"), np.zeros((4, 1), "float32"))


@pytest.mark.parametrize("depth", [-1, True, False, 1.5, 1.0, "1", None], ids=repr)
def test_a_staging_depth_that_counts_nothing_is_refused(depth):
    with pytest.raises(MgpuError, match=r"needs a whole number of batches, 0 or more\. Pass 1 .*or 0 to turn") as error:
        make_parallel(dense(), TWO, staging_depth=depth)
    assert f"make_parallel(staging_depth={depth!r})" in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_whole_numbers_are_staging_depths(depth):
    assert make_parallel(dense(), TWO, staging_depth=depth).describe()["staging_depth"] == depth


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("loss_scope", "row", "'auto', 'batch', 'tower'"),
        ("loss_scope", None, "'auto', 'batch', 'tower'"),
        ("data_shard", "row", "'rows', 'batches', 'none'"),
        ("data_shard", 1, "'rows', 'batches', 'none'"),
    ],
)
def test_what_is_no_choice_is_refused_with_all_choices(name, value, choices):
    with pytest.raises(MgpuError) as error:
        make_parallel(dense(), TWO, **{name: value})
    assert str(error.value) == f"make_parallel({name}={value!r}) is not a choice. Pass one of {choices}."


@pytest.mark.parametrize("strategy", ["ring", None, 5, mgpu.ParameterServer], ids=repr)
def test_an_unknown_strategy_is_refused_with_all_names(strategy):
    with pytest.raises(StrategyError) as error:
        make_parallel(dense(), TWO, strategy=strategy)
    message = str(error.value)
    assert f"make_parallel(strategy={strategy!r}) is not a strategy" in message
    assert "'auto', 'single', 'parameter_server', or an instance such as mgpu.ParameterServer('/CPU:0')" in message


def test_the_instance_that_the_message_names_works():
    model = make_parallel(dense(), TWO, strategy=mgpu.ParameterServer("/CPU:1"))
    assert model.describe()["variables_on"] == ["/CPU:1"]


def test_a_device_beside_a_strategy_object_is_refused():
    with pytest.raises(StrategyError, match="says twice where the weights live") as error:
        make_parallel(dense(), TWO, strategy=mgpu.ParameterServer(), ps_device="/CPU:1")
    assert "Pass ps_device to the strategy: ParameterServer('/CPU:1')." in str(error.value)


@pytest.mark.parametrize("strategy", ["single", mgpu.SingleDevice()], ids=["name", "object"])
def test_the_single_strategy_is_refused_for_several_towers(strategy):
    with pytest.raises(StrategyError, match=r"is for one tower; there are 2: /CPU:0, /CPU:1\.") as error:
        make_parallel(dense(), TWO, strategy=strategy)
    assert "Pass gpus=1, or strategy='parameter_server'." in str(error.value)
    assert make_parallel(dense(), TWO[:1], strategy=strategy).describe()["strategy"] == "single"
    assert make_parallel(dense(), TWO, strategy="parameter_server").describe()["strategy"] == "parameter_server"


@pytest.mark.parametrize("ps_device", [[], None], ids=repr)
def test_no_device_for_the_weights_is_refused(ps_device):
    with pytest.raises(StrategyError, match=r"names no device\. Pass a device such as '/CPU:0', or 'spread'"):
        make_parallel(dense(), TWO, ps_device=ps_device)


@pytest.mark.parametrize(
    ("towers", "strategy"),
    [
        pytest.param(TWO, "auto", id="two-towers"),
        pytest.param(TWO[:1], "auto", id="one-tower"),
        pytest.param(TWO[:1], "single", id="single"),
    ],
)
def test_a_device_that_is_not_there_is_refused_for_the_weights(towers, strategy):
    with pytest.raises(DeviceError):
        make_parallel(dense(), towers, strategy=strategy, ps_device="/CPU:9")


def test_several_devices_for_the_weights_are_refused_for_the_single_strategy():
    with pytest.raises(StrategyError):
        make_parallel(dense(), TWO[:1], strategy="single", ps_device=["/CPU:1", "/CPU:2"])


def test_the_single_strategy_takes_one_device_for_the_weights():
    model = make_parallel(dense(), TWO[:1], strategy="single", ps_device="/CPU:3")
    assert model.describe()["variables_on"] == ["/CPU:3"]


def test_the_first_fault_is_told_before_anything_is_moved():
    model = dense()
    with pytest.raises(MgpuError):
        make_parallel(model, TWO, ps_device="/CPU:2", loss_scope="row")
    assert "CPU:0" in model.layers[0].kernel.value.device


def test_every_refusal_is_an_mgpu_error_and_a_value_error():
    for kind in (ModelError, StrategyError, DeviceError, checks.ArgumentError):
        assert issubclass(kind, MgpuError)
        assert issubclass(kind, ValueError)


def test_a_model_without_trainable_weights_is_warned_of():
    model = dense()
    model.trainable = False
    model = make_parallel(model, TWO)
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning, match=r"'plain' does not have any trainable weights.*trainable = True and compile"):
        model.train_on_batch(np.zeros((4, 4), "float32"), np.zeros((4, 1), "float32"))


def test_training_without_any_loss_is_refused():
    model = make_parallel(dense(), TWO)
    model.compile("sgd", jit_compile=False)
    with pytest.raises(ModelError, match=r"'plain' has no loss to compute.*model\.compile\(optimizer, loss='mse'\)"):
        model.train_on_batch(np.zeros((4, 4), "float32"), np.zeros((4, 1), "float32"))
