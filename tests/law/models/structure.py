"""Law models by structure: several inputs and outputs, sharing, nesting, subclassing, lazy building."""

import keras
from keras import layers, ops

from .registry import Built, classes, law_model, sgd, tabular


def has_weighted_mean() -> bool:
    """Whether this Keras has the reduction "mean_with_sample_weight" (3.7 and later)."""
    try:
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    except ValueError:
        return False
    return True


@law_model()
def dict_inputs() -> Built:
    a = layers.Input((3,), name="a")
    b = layers.Input((2, 2), name="b")
    hidden = layers.Concatenate()([layers.Dense(2)(a), layers.Flatten()(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(hidden))

    def data(rows, rng):
        x = {
            "a": rng.normal(size=(rows, 3)).astype("float32"),
            "b": rng.normal(size=(rows, 2, 2)).astype("float32"),
        }
        return x, x["a"][:, :1] - x["b"][:, 0, :1]

    return Built(model, data, lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model(weights_kinds=("none", "rows", "outputs"))
def dict_outputs() -> Built:
    inputs = layers.Input((4,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    outputs = {
        "price": layers.Dense(1, name="price")(hidden),
        "kind": layers.Dense(3, activation="softmax", name="kind")(hidden),
    }
    draw = classes()

    def data(rows, rng):
        x, kind = draw(rows, rng)
        return x, {"price": x[:, :1] * 2, "kind": kind}

    return Built(
        keras.Model(inputs, outputs),
        data,
        lambda: {
            "optimizer": sgd(),
            "loss": {"price": "mse", "kind": "sparse_categorical_crossentropy"},
            "loss_weights": {"price": 0.5, "kind": 2.0},
            "metrics": {"kind": ["accuracy"], "price": ["mae"]},
        },
    )


@law_model(weights_kinds=("none", "rows", "outputs"))
def list_outputs() -> Built:
    """Three losses that divide by three different things."""
    inputs = layers.Input((4,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    outputs = [layers.Dense(2, name=name)(hidden) for name in ("summed", "meaned", "weighted")]
    draw = tabular(targets=2)

    def data(rows, rng):
        x, y = draw(rows, rng)
        return x, [y, 2 * y, -y]

    weighted_mean = "mean_with_sample_weight" if has_weighted_mean() else "sum_over_batch_size"
    return Built(
        keras.Model(inputs, outputs),
        data,
        lambda: {
            "optimizer": sgd(0.02),
            "loss": [
                keras.losses.MeanSquaredError(reduction="sum"),
                keras.losses.MeanAbsoluteError(reduction="sum_over_batch_size"),
                keras.losses.MeanSquaredError(reduction=weighted_mean),
            ],
        },
    )


@law_model()
def siamese() -> Built:
    shared = layers.Dense(3, activation="tanh")
    left, right = layers.Input((3,)), layers.Input((3,))
    distance = layers.Subtract()([shared(left), shared(right)])
    model = keras.Model((left, right), layers.Dense(1)(distance))

    def data(rows, rng):
        x = [rng.normal(size=(rows, 3)).astype("float32") for _ in range(2)]
        return x, (x[0] - x[1])[:, :1]

    return Built(model, data, lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def nested() -> Built:
    """A sub-model that is called twice, beside a layer of its own outside it."""
    inner_inputs = layers.Input((4,))
    inner = keras.Model(inner_inputs, layers.Dense(4, activation="tanh")(inner_inputs), name="inner")
    inputs = layers.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(inner(inner(inputs))))
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@keras.saving.register_keras_serializable("law")
class Perceptron(keras.Model):
    """Not built before the first batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(3, activation="tanh")
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@keras.saving.register_keras_serializable("law")
class TwoMinded(keras.Model):
    """Computes something else in training than in inference."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(3, activation="tanh")
        self.out = layers.Dense(1)

    def call(self, inputs, training=False):
        hidden = self.hidden(inputs)
        return self.out(hidden * 0.5 if training else hidden)


@law_model()
def subclassed() -> Built:
    return Built(Perceptron(), tabular(), lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]})


@law_model()
def subclassed_training() -> Built:
    return Built(TwoMinded(), tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def lazy_sequential() -> Built:
    model = keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(momentum=0.5), "loss": "mse"})


@keras.saving.register_keras_serializable("law")
class StepCounter(layers.Layer):
    """Counts training steps in an integer variable and scales by nothing else."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

    def call(self, inputs, training=False):
        if training:
            self.seen.assign_add(1)
        return inputs


@law_model()
def step_counter() -> Built:
    """An integer state moves once a step, not once a tower."""
    inputs = layers.Input((4,))
    outputs = layers.Dense(1)(StepCounter()(inputs))
    return Built(keras.Model(inputs, outputs), tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def partly_frozen() -> Built:
    """A frozen layer, a constraint, and a layer that nothing uses for the loss."""
    frozen = layers.Dense(4, activation="tanh")
    frozen.trainable = False
    inputs = layers.Input((4,))
    hidden = layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.7))(frozen(inputs))
    outputs = layers.Dense(1)(hidden)
    return Built(keras.Model(inputs, outputs), tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model(weights_kinds=("none",))
def autoencoder() -> Built:
    """No targets and no compiled loss: all of it comes from add_loss."""
    inputs = layers.Input((4,))
    code = layers.Dense(2)(inputs)
    outputs = ReconstructionLoss()([inputs, layers.Dense(4)(code)])

    def data(rows, rng):
        return rng.normal(size=(rows, 4)).astype("float32"), None

    return Built(keras.Model(inputs, outputs), data, lambda: {"optimizer": sgd(), "loss": None})


@keras.saving.register_keras_serializable("law")
class ReconstructionLoss(layers.Layer):
    def call(self, inputs):
        wanted, got = inputs
        self.add_loss(ops.mean(ops.square(wanted - got)))
        return got
