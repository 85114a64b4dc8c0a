"""Law models by how they are trained: optimizers and their options, precision."""

import keras
from keras import layers

from .registry import Built, classes, law_model, sgd, tabular

# Adam's step is m / sqrt(v): where a gradient is nearly zero its rounding is amplified, so the runs
# drift apart by up to (rounding / gradient) of a step. A larger epsilon bounds that.
_EPSILON = 1e-3
_ADAM = {"rtol": 1e-4, "atol": 1e-5}


def _regression(**compile_args) -> Built:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
    return Built(
        model,
        tabular(),
        lambda: {"loss": "mse", "optimizer": compile_args["optimizer"]()},
    )


@law_model(**_ADAM)
def clipnorm_adam() -> Built:
    """Clipping acts on the whole batch's gradient: a tower's own is longer."""
    return _regression(optimizer=lambda: keras.optimizers.Adam(0.02, clipnorm=0.3, epsilon=_EPSILON))


@law_model()
def global_clipnorm() -> Built:
    return _regression(optimizer=lambda: sgd(0.1, momentum=0.9, global_clipnorm=0.5))


@law_model()
def clipvalue() -> Built:
    return _regression(optimizer=lambda: sgd(0.1, clipvalue=0.1))


@law_model()
def accumulation() -> Built:
    """The window of two steps does not end with the epoch when the steps are odd."""
    return _regression(optimizer=lambda: sgd(0.1, gradient_accumulation_steps=2))


@law_model()
def moving_average() -> Built:
    return _regression(optimizer=lambda: sgd(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2))


@law_model(**_ADAM)
def adamw() -> Built:
    return _regression(optimizer=lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, epsilon=_EPSILON))


@law_model()
def schedule() -> Built:
    """A learning rate that moves with the optimizer's own count of steps."""
    return _regression(optimizer=lambda: sgd(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))


def _mixed(policy: str) -> Built:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(8, activation="tanh"),
                layers.Dense(3, dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)
    return Built(
        model,
        classes(),
        lambda: {
            "optimizer": sgd(0.1),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        },
    )


@law_model(rtol=2e-2, atol=2e-3)  # float16 keeps 11 bits, 5e-4 a rounding
def mixed_float16() -> Built:
    return _mixed("mixed_float16")


@law_model(rtol=5e-2, atol=1e-2)  # bfloat16 keeps 8 bits, 4e-3 a rounding
def mixed_bfloat16() -> Built:
    return _mixed("mixed_bfloat16")
