"""Which losses can be cut by rows, and how a cut loss is put together again exactly.

A Keras loss that averages is a ratio: a sum over rows, divided by what its reduction counts. Each tower
returns the two sums apart (a `Term`), and they are added up before the division.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from mgpu.errors import ModelError

_MARK = "_mgpu_rowwise"

# Keras' own losses that compare or pool rows of the batch, so that a part's loss is not a part of the loss.
# Dice and Tversky are row by row when `axis` leaves out dimension 0.
_WHOLE_BATCH = ("circle", "dice", "tversky")


def rowwise(loss: Any) -> Any:
    """Declare that a custom loss looks at each row by itself, so that it can be cut over towers.

    Without the mark, `loss_scope="auto"` gathers the outputs of all towers and computes a custom loss once on
    the whole batch: exact for any loss, at the price of moving the outputs. With it each tower computes the
    loss of its own rows and only sums travel.

    Args:
        loss: a function `(y_true, y_pred)` that returns one value per row (or per row and position), a
            `keras.losses.Loss` whose `call` does, or an overridden `Model.compute_loss` (used as a decorator)
            whose value for a batch is the row-weighted mean of its values for the parts.

    Returns:
        The same object, marked: saved models do not depend on mgpu.

    Raises:
        ModelError: `loss` is not callable, or cannot carry the mark.

    Example:
        >>> import keras, mgpu
        >>> @mgpu.rowwise
        ... def huber_like(y_true, y_pred):
        ...     return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)
    """
    if isinstance(loss, str) or not callable(loss):
        raise ModelError(
            f"mgpu.rowwise({loss!r}) needs a loss function or a keras.losses.Loss; it got a "
            f"{type(loss).__name__}. Keras' own losses are known already: pass loss={loss!r} to compile() as it is."
        )
    try:
        setattr(loss, _MARK, True)
    except AttributeError as error:
        raise ModelError(
            f"mgpu.rowwise({loss!r}) cannot mark a {type(loss).__name__}: it takes no attributes. "
            "Wrap it in a function: mgpu.rowwise(lambda y_true, y_pred: loss(y_true, y_pred))."
        ) from error
    return loss


def is_marked_rowwise(loss: Any) -> bool:
    """Return whether `loss` was declared by `rowwise`."""
    return bool(getattr(loss, _MARK, False))


def is_rowwise(loss: keras.losses.Loss) -> bool:
    """Return whether the loss of a batch can be summed up from the losses of its rows.

    True for Keras' own losses, except those that pool over the batch, and for what `rowwise` marked.
    """
    function = getattr(loss, "fn", None)
    if is_marked_rowwise(loss) or is_marked_rowwise(function):
        return True
    if loss.reduction in (None, "none"):
        return False  # Keras then trains on the sum and reports the mean: leave that to Keras itself.
    if not is_keras_own(type(loss)) or not (function is None or is_keras_own(function)):
        return False
    if not (pools_rows(function) or type(loss).__name__.lower() in _WHOLE_BATCH):
        return True
    axis = getattr(loss, "axis", None)
    return axis is not None and 0 not in (axis if isinstance(axis, (tuple, list)) else (axis,))


def is_keras_own(symbol: Any) -> bool:
    """Return whether a class, function or object comes from Keras itself."""
    return (getattr(symbol, "__module__", None) or "").startswith("keras.")


def pools_rows(function: Any) -> bool:
    """Return whether a loss function of Keras' own looks at several rows at once."""
    return getattr(function, "__name__", "") in _WHOLE_BATCH


class Term(NamedTuple):
    """One loss of one output over one part: `numerator / denominator` is its mean.

    `kind` says what a whole batch divides by: "sum" nothing, "rows" a count in proportion to the rows,
    "data" a count that only the data tells (sum of weights, valid entries of a mask).
    """

    numerator: tf.Tensor
    denominator: tf.Tensor
    kind: str


def loss_terms(compile_loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> list[Term]:
    """Return the compiled losses of a part as numerators and denominators.

    Args:
        compile_loss: the built `CompileLoss` of a compiled model, or None.
        y, y_pred, sample_weight: as for `Model.compute_loss`, for the rows of one part.

    Returns:
        One Term for each loss, in Keras' order; scalars.

    Source:
        keras.losses.Loss.__call__ and its reductions: `sum_over_batch_size` and `mean` divide by the number
        of values, or by the valid entries where there is a mask; `mean_with_sample_weight` by the sum of the
        weights; `sum` by nothing.
    """
    if compile_loss is None:
        return []
    terms: list[Term] = []

    def recording(index: int, loss: keras.losses.Loss) -> Any:
        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            terms.append(_term(loss, y_true, y_pred, sample_weight))
            return terms[-1].numerator

        return call

    replace_losses(compile_loss, recording, metrics=False).call(y, y_pred, sample_weight)
    return terms


def total_loss(compile_loss: Any, values: list[tf.Tensor], y: Any, y_pred: Any, record: bool) -> tf.Tensor | None:
    """Return the weighted sum of losses, as Keras weights and sums them.

    Args:
        compile_loss: the built `CompileLoss` of a compiled model, or None.
        values: one scalar for each loss, in the order of `loss_terms`.
        y, y_pred: anything in the nesting of the targets and outputs; Keras reads only the static size of
            the first dimension of `y_pred`.
        record: whether Keras updates its tracker of each loss.
    """
    if compile_loss is None:
        return None
    known = replace_losses(compile_loss, lambda index, loss: lambda *args: values[index], metrics=record)
    return known.call(y, y_pred, None)


def flat_losses(compile_loss: Any) -> list[keras.losses.Loss]:
    """Return the compiled losses that are not None, in Keras' order."""
    if compile_loss is None:
        return []
    if hasattr(compile_loss, "_flat_losses"):
        return [entry.loss for entry in compile_loss._flat_losses]
    return [loss for loss in compile_loss.flat_losses if loss]  # Keras 3.6


def replace_losses(compile_loss: Any, replace: Callable[[int, Any], Any], metrics: bool = True) -> Any:
    """Return a copy of `compile_loss` that calls `replace(index, loss)` in the place of each loss.

    Keras goes on matching structures, weighting and summing as it always does.
    """
    changed = _shallow_copy(compile_loss)
    losses = flat_losses(compile_loss)
    stand_ins = [replace(index, loss) for index, loss in enumerate(losses)]
    if hasattr(compile_loss, "_flat_losses"):
        changed._flat_losses = [
            entry._replace(loss=new) for entry, new in zip(compile_loss._flat_losses, stand_ins, strict=True)
        ]
        slots = len(losses)
    else:
        rest = iter(stand_ins)
        changed.flat_losses = [next(rest) if loss else None for loss in compile_loss.flat_losses]
        slots = len(changed.flat_losses)
    if not metrics:
        changed._metrics = [None] * slots
    return changed


def _term(loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> Term:
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return _scalar_term(loss(y_true, y_pred, sample_weight), y_pred)
    seen = {}
    bare = _shallow_copy(loss)
    bare.reduction = None

    def call(y_true: Any, y_pred: Any) -> tf.Tensor:
        seen["values"] = loss.call(y_true, y_pred)
        return seen["values"]

    bare.call = call
    weighted = bare(y_true, y_pred, sample_weight)
    if weighted.shape.rank == 0:
        return _scalar_term(weighted, y_pred)
    numerator = tf.reduce_sum(weighted)
    if loss.reduction == "sum":
        return Term(numerator, tf.ones_like(numerator), "sum")
    count = _count(weighted, numerator.dtype)
    masks = [m for m in map(_mask_of, (y_pred, seen["values"])) if m is not None]
    mask = tf.cast(masks[0] if len(masks) == 1 else masks[0] & masks[1], numerator.dtype) if masks else None
    if loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        return Term(numerator, _sum_of_weights(sample_weight, mask, numerator.dtype), "data")
    if mask is not None:
        share = tf.math.divide_no_nan(count, _count(mask, numerator.dtype))
        return Term(numerator, tf.reduce_sum(mask) * share, "data")
    return Term(numerator, count, "rows")


def _scalar_term(value: Any, y_pred: Any) -> Term:
    # The loss has reduced itself: all that is left is to weigh it by the rows it saw.
    value = tf.reduce_mean(value)
    rows = tf.cast(tf.shape(tf.nest.flatten(y_pred)[0])[0], value.dtype)
    return Term(value * rows, rows, "rows")


def _sum_of_weights(sample_weight: Any, mask: Any, dtype: tf.DType) -> tf.Tensor:
    if sample_weight is None:
        return tf.reduce_sum(mask)
    weights = tf.cast(sample_weight, dtype)
    if mask is None:
        return tf.reduce_sum(weights)
    if mask.shape.rank == weights.shape.rank + 1:
        weights = weights[..., tf.newaxis]
    elif weights.shape.rank == mask.shape.rank + 1:
        mask = mask[..., tf.newaxis]
    return tf.reduce_sum(weights * mask)


def _count(values: Any, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.size(values), dtype)


def _mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


def _shallow_copy(thing: Any) -> Any:
    # copy.copy() would go through Keras' pickling, which saves the object and loads it again.
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin
