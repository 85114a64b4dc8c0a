"""What make_parallel() refuses, before anything starts: each with the layer or argument and the remedy."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu.errors import MgpuError, ModelError


def plain_model(model: Any) -> keras.Model:
    """Return the plain model of `model`, which may be parallel already.

    Raises:
        ModelError: `model` is no Keras model, or was made under a tf.distribute strategy.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"make_parallel() needs a keras.Model; it got {model!r} of type {type(model).__name__}. If it is a layer "
            "or a function, wrap it: keras.Sequential([keras.Input(shape), layer])."
        )
    runtime = getattr(type(model), "_mgpu", None)
    plain = model if runtime is None else runtime.plain
    strategy = plain.__dict__.get("_distribute_strategy") or (
        tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    )
    if strategy is not None:
        raise ModelError(
            f"make_parallel() got the model {plain.name!r} under {type(strategy).__name__}; both would split the "
            "batch. Make the model outside strategy.scope() and pass it to make_parallel() alone."
        )
    return plain


def refuse_unfit(model: keras.Model, towers: Sequence[str]) -> None:
    """Refuse a model that several towers cannot train with the plain model's numbers.

    Raises:
        ModelError: a custom step, a stateful or fixed-batch layer.
    """
    if len(towers) == 1:
        return
    _refuse_custom_step(model, towers)
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"make_parallel() was asked for {len(towers)} towers; the layer {layer.name!r} "
                f"({type(layer).__name__}) is stateful: its state belongs to the rows of one fixed batch, which "
                "towers would share out. Build it with stateful=False, or pass gpus=1."
            )
    for tensor in _inputs(model):
        if tensor.shape and tensor.shape[0] is not None:
            raise ModelError(
                f"make_parallel() was asked for {len(towers)} towers; the input {tensor.name!r} has the fixed batch "
                f"size {tensor.shape[0]}, and a tower gets a part of each batch. Write Input(shape={tensor.shape[1:]}) "
                "in the place of batch_shape, or pass gpus=1."
            )


def _refuse_custom_step(model: keras.Model, towers: Sequence[str]) -> None:
    for name in ("train_step", "test_step", "make_train_function", "make_test_function"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"make_parallel() was asked for {len(towers)} towers; {type(model).__name__} overrides {name}(), which "
                "applies gradients or reports numbers by itself, for one batch on one device. Override "
                "compute_loss() and compute_metrics() instead, or pass gpus=1 (one tower per process)."
            )


def _inputs(model: keras.Model) -> list[Any]:
    try:
        return list(model.inputs or [])
    except (AttributeError, ValueError):  # not built yet, or subclassed
        return []


def warn_untrainable(model: keras.Model) -> None:
    """Warn that training the model changes nothing, as Keras does."""
    warnings.warn(
        f"The model {model.name!r} does not have any trainable weights: fit() reports its loss and changes nothing. "
        "If a layer should be trained, set layer.trainable = True and compile again.",
        stacklevel=2,
    )


def staging_depth(value: Any) -> int:
    """Return `value` as a number of batches.

    Raises:
        MgpuError: it is not a whole number of 0 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(
            f"make_parallel(staging_depth={value!r}) needs a whole number of batches, 0 or more. "
            "Pass 1 to have the next batch ready on each device, or 0 to turn staging off."
        )
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, if it is one of `choices`.

    Raises:
        MgpuError: it is not.
    """
    if value not in choices:
        raise ArgumentError(
            f"make_parallel({name}={value!r}) is not a choice. Pass one of {', '.join(map(repr, choices))}."
        )
    return value


class ArgumentError(MgpuError, ValueError):
    """An argument of make_parallel() has a value that it cannot have."""
