"""Which metrics can be added up over towers: old state + the sum of the towers' changes."""

from typing import Any

import keras

from mgpu.errors import ModelError
from mgpu.losses import is_keras_own, pools_rows

_MARK = "_mgpu_additive"


def additive(metric: Any) -> Any:
    """Declare that the state of a custom metric is a sum over rows that starts at zero.

    Each tower then updates the metric for its own rows. Without the mark the outputs of all towers are
    gathered and a custom metric is updated once on the whole batch: exact for any metric, at the price of
    moving the outputs. Keras' own metrics are known to be additive.

    Args:
        metric: a `keras.metrics.Metric` instance, or a metric function `(y_true, y_pred)` that returns one
            value per row.

    Returns:
        The same object, marked.

    Raises:
        ModelError: `metric` is neither.

    Example:
        >>> import keras, mgpu
        >>> class Rows(keras.metrics.Sum):
        ...     def update_state(self, y_true, y_pred, sample_weight=None):
        ...         return super().update_state(keras.ops.ones_like(y_true))
        >>> metric = mgpu.additive(Rows(name="rows"))
    """
    if isinstance(metric, str) or not (callable(metric) or isinstance(metric, keras.metrics.Metric)):
        raise ModelError(
            f"mgpu.additive({metric!r}) needs a metric object or a metric function; it got a "
            f"{type(metric).__name__}. Keras' own metrics are known already: pass metrics=[{metric!r}] as it is."
        )
    try:
        setattr(metric, _MARK, True)
    except AttributeError as error:
        raise ModelError(
            f"mgpu.additive({metric!r}) cannot mark a {type(metric).__name__}: it takes no attributes. "
            "Wrap it in a function: mgpu.additive(lambda y_true, y_pred: metric(y_true, y_pred))."
        ) from error
    return metric


def is_additive(metric: keras.metrics.Metric) -> bool:
    """Return whether `metric` can be updated tower by tower and added up."""
    function = getattr(metric, "_fn", None)
    if getattr(metric, _MARK, False) or getattr(function, _MARK, False):
        return True
    if not is_keras_own(type(metric)):
        return False
    # A metric function may return one number for the batch, and so does a loss object. Keras' own functions
    # return one per row, but for those that pool over the batch.
    per_row = is_keras_own(function) and not isinstance(function, keras.losses.Loss) and not pools_rows(function)
    return function is None or per_row
