"""Law models by loss: penalties, add_loss, custom and whole-batch losses, custom metrics."""

import keras
from keras import layers, ops

from mgpu import rowwise

from .registry import Built, binary, classes, law_model, sgd, tabular


@law_model()
def regularised() -> Built:
    """Weight penalties count once a step; the activity penalty is a mean over the whole batch."""
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(
                3,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(0.1),
                bias_regularizer=keras.regularizers.L2(0.05),
                activity_regularizer=keras.regularizers.L1(0.05),
            ),
            layers.Dense(1),
        ]
    )
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]})


@keras.saving.register_keras_serializable("law")
class MeanPenalty(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


@keras.saving.register_keras_serializable("law")
class SumPenalty(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.02 * ops.sum(ops.square(inputs)))
        return inputs


@law_model()
def add_loss_mean() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3), MeanPenalty(), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})


@law_model()
def add_loss_sum() -> Built:
    """An add_loss term that grows with the batch."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3), SumPenalty(), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(0.05), "loss": "mse"})


@law_model()
def ignore_class() -> Built:
    """Labels to be ignored fall unevenly on the towers; the loss divides by the others."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3)])
    draw = classes()

    def data(rows, rng):
        x, y = draw(rows, rng)
        y[: rows // 2 : 2] = -1
        return x, y

    return Built(
        model,
        data,
        lambda: {
            "optimizer": sgd(),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1),
        },
    )


def scaled_error(y_true, y_pred):
    """One value a row: (B, 1), (B, 1) -> (B,)."""
    return ops.mean(ops.abs(y_true - y_pred) * (1 + ops.abs(y_true)), axis=-1)


def squared_error(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def spread_error(y_true, y_pred):
    """Compares rows with each other: the batch cannot be cut. Returns a scalar."""
    error = y_true - y_pred
    return ops.mean(ops.square(error)) + 0.5 * ops.square(ops.mean(error)) + ops.var(y_pred)


def hardest_row(y_true, y_pred):
    """A row's error against the batch's largest: (B,), but not row by row."""
    error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return error * (0.5 + error / (1e-3 + ops.max(error)))


@keras.saving.register_keras_serializable("law")
class WorstError(keras.metrics.Metric):
    """The largest absolute error so far: its state is a maximum, which no sum of changes gives."""

    def __init__(self, name="worst", **kwargs):
        super().__init__(name=name, **kwargs)
        self.worst = self.add_variable(shape=(), initializer="zeros", name="worst")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, "float32") - y_pred))
        self.worst.assign(ops.maximum(self.worst, error))

    def result(self):
        return self.worst + 0.0


@law_model()
def rowwise_loss() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return Built(
        model,
        tabular(),
        lambda: {"optimizer": sgd(), "loss": rowwise(scaled_error), "metrics": [squared_error]},
    )


@law_model()
def undeclared_loss() -> Built:
    """Row by row in fact, not declared so: gathered, and the same."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": squared_error})


@law_model(weights_kinds=("none",))
def whole_batch_loss() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": spread_error})


@law_model()
def hardest_row_loss() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": hardest_row, "metrics": ["mae"]})


@law_model(weights_kinds=("none",))
def dice() -> Built:
    """Keras' Dice sums over the whole batch before it divides."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1, activation="sigmoid")])
    return Built(model, binary(), lambda: {"optimizer": sgd(), "loss": keras.losses.Dice()})


@law_model()
def custom_metric() -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse", "metrics": [WorstError()]})


@law_model(parallel_args=(("loss_scope", "batch"),))
def batch_scope() -> Built:
    """loss_scope="batch" changes nothing for a loss that could have been cut."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return Built(model, tabular(), lambda: {"optimizer": sgd(), "loss": "mse", "metrics": ["mae"]})


@keras.saving.register_keras_serializable("law")
class OwnLoss(keras.Model):
    """compute_loss compares rows: each prediction with the batch's mean."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = layers.Dense(1)

    def call(self, inputs):
        return self.out(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        centred = (y_pred - ops.mean(y_pred)) - (y - ops.mean(y))
        return ops.mean(ops.square(centred)) + 0.1 * ops.mean(ops.square(y - y_pred))


@law_model(weights_kinds=("none",))
def own_compute_loss() -> Built:
    return Built(OwnLoss(), tabular(), lambda: {"optimizer": sgd(), "loss": "mse"})
