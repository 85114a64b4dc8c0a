"""broadcast_variables(): one rank's values for all; and how variables are compared over ranks before anything moves."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu.cluster.world import world
from mgpu.errors import RankError


def broadcast_variables(variables: Any, root: int = 0) -> None:
    """Give the variables of all ranks the values of rank `root`. Every rank calls this.

    Call it once before a training loop of your own, after the weights were made or read: ranks that start from
    different weights stay different, whatever is done with the gradients. Moves one copy of the variables into each
    rank, through the host. `make_parallel` does this by itself.

    Args:
        variables: a model or layer (its weights; not the state of its metrics and random seeds, which is each
            rank's own), an optimizer (its slots, iteration and learning rate), a Keras or TensorFlow variable, or a
            list of these.
        root: the rank whose values are taken, 0 to size - 1, the same on all ranks.

    Raises:
        RankError: on every rank, before a value has changed: the ranks' variables differ in number, path, shape or
            dtype; a rank passes something else, or nothing; `root` differs or is no rank; a rank is lost.

    Example:
        >>> import keras, mgpu
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> mgpu.broadcast_variables(model)
    """
    group = world()
    found, fault = _variables_of(variables)
    described = [describe(variable) for variable in found]
    every = group.gather((root, described, fault), "mgpu.broadcast_variables()")
    roots = [other for other, _, _ in every]
    asked = f"mgpu.broadcast_variables(root={root!r})"
    for rank, (_, _, fault_there) in enumerate(every):
        if fault_there:
            raise RankError(f"{asked} on rank {rank}: {fault_there}")
    if any(other != roots[0] for other in roots):
        raise RankError(
            f"{asked}: the ranks ask for the values of different ranks: {_by_rank(roots)}. Pass the same root on all, "
            "such as root=0."
        )
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < group.size:
        raise RankError(f"{asked}: there is no such rank among {group.size}. Pass root=0, or up to {group.size - 1}.")
    differs = difference([there for _, there, _ in every])
    if differs:
        raise RankError(
            f"{asked}: {differs}. A layer or optimizer that only some ranks make, or build, is the usual cause. Run "
            "the same lines on every rank, such as optimizer.build(model.trainable_variables), and name layers that "
            "some ranks make after others: Dense(10, name='head')."
        )
    if group.size == 1:
        return
    for variable, what in zip(found, described, strict=True):
        value = group.broadcast_array(value_of(variable), root, f"mgpu.broadcast_variables(): {what}")
        if group.rank != root:
            variable.assign(value)


def describe(variable: Any) -> str:
    """Return path, shape and dtype of a Keras or TensorFlow variable."""
    path = getattr(variable, "path", None) or variable.name
    return f"{path} {tuple(variable.shape)} {_dtype_name(variable)}"


def value_of(variable: Any) -> np.ndarray:
    """Return the value of a Keras or TensorFlow variable."""
    return np.asarray(keras.ops.convert_to_numpy(variable) if isinstance(variable, keras.Variable) else variable)


def has_value(variable: Any) -> bool:
    """Return whether a Keras or TensorFlow variable was given its first value."""
    return bool((variable.value if isinstance(variable, keras.Variable) else variable).is_initialized())


def difference(every: Sequence[Sequence[str]], shown: Sequence[Sequence[str]] | None = None) -> str:
    """Return in what way the ranks' descriptions of variables differ from rank 0's, "" if in none.

    Args:
        every: `every[r][v]` describes variable v of rank r.
        shown: the same, in the words of the message; `every` if left out.
    """
    first, shown = every[0], shown or every
    for rank, other in enumerate(every):
        for v, (here, there) in enumerate(zip(first, other, strict=False)):
            if here != there:
                return (
                    f"variable {v + 1} of {len(first)} is {shown[0][v]} on rank 0 and {shown[rank][v]} on rank {rank}"
                )
        if len(first) != len(other):
            more, fewer = (0, rank) if len(first) > len(other) else (rank, 0)
            lacking = shown[more][len(every[fewer])]
            return (
                f"rank 0 has {len(first)} variables and rank {rank} has {len(other)}: {lacking} is on rank {more} and "
                f"not on rank {fewer}"
            )
    return ""


def _variables_of(given: Any) -> tuple[list[Any], str]:
    """Return the variables of what was passed, and what is wrong with it ("" if nothing): all ranks have to know."""
    if not tf.executing_eagerly():
        return [], "it was called inside a tf.function, where variables have no values. Call it before the loop."
    found: list[Any] = []
    for item in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(item, (keras.Variable, tf.Variable)):
            found.append(item)
        elif isinstance(item, keras.Layer):
            if not item.built:
                return [], (
                    f"the {type(item).__name__} {item.name!r} is not built, so it has no weights yet. Call it on a "
                    "batch first, or model.build(input_shape)."
                )
            found += item.weights
        elif isinstance(item, keras.optimizers.Optimizer):
            found += item.variables
        elif isinstance(item, (list, tuple)):
            inner, fault = _variables_of(item)
            if fault:
                return [], fault
            found += inner
        else:
            return [], (
                f"{item!r} of type {type(item).__name__} is no model, optimizer or variable. Pass model, "
                "[model, optimizer] or a list of variables; other values travel by mgpu.broadcast_object()."
            )
    for variable in found:
        if not _dtype_name(variable).startswith(("float", "bfloat", "int", "uint", "bool", "complex")):
            return [], f"the variable {describe(variable)} holds no numbers. Leave it out of the list."
        if not has_value(variable):
            return [], (
                f"the variable {describe(variable)} has no value: the tf.function that made it has failed. Make the "
                "model and the optimizer anew, and build them before the first step."
            )
    return found, ""


def _dtype_name(variable: Any) -> str:
    return keras.backend.standardize_dtype(variable.dtype) if isinstance(variable.dtype, str) else variable.dtype.name


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
