"""How state that is not a gradient is combined: statistics, seeds, counters.

T = towers. Each tower starts from the same old value and returns a new one; the merged value is written once.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

# Added to a seed once per tower. Any odd number does: TensorFlow hashes the seed before it draws.
_SEED_STRIDE = 1_000_003


def is_seed(variable: keras.Variable) -> bool:
    """Return whether `variable` is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def starting_value(variable: keras.Variable, value: tf.Tensor, tower: int) -> tf.Tensor:
    """Return the value of a state variable from which `tower` starts.

    Seeds differ by tower, so that no two draw the same mask; tower 0 draws what the plain model would.
    """
    if tower == 0 or not is_seed(variable):
        return value
    return value + tf.constant([tower * _SEED_STRIDE, 0], value.dtype)


def merge_state(
    variable: keras.Variable, old: tf.Tensor, new: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Return the one new value of a state variable.

    Args:
        variable: says how, by its Keras `aggregation`: "sum" adds up the towers' changes,
            "only_first_replica" takes the first tower that had rows. Otherwise seeds advance once, floats take
            the row-weighted mean (the rule for moving statistics), and integers must agree.
        old: its value before the step.
        new: T values of its shape and dtype.
        rows: T scalar int64, the rows each tower saw. A tower without rows has no say, even if its value is NaN.

    Raises:
        tf.errors.InvalidArgumentError: an integer or boolean differs between towers (when the step runs).

    Source:
        For a moving average m*old + (1-m)*statistic, the row-weighted mean of the towers' new values is the
        moving average of the row-weighted mean of their statistics.
    """
    if is_seed(variable):
        return new[0]
    if variable.aggregation == "sum":
        changes = [tf.where(r > 0, n - old, tf.zeros_like(old)) for n, r in zip(new, rows, strict=True)]
        return old + tf.add_n(changes)
    first = new[-1]
    for value, count in zip(reversed(new[:-1]), reversed(rows[:-1]), strict=True):
        first = tf.where(count > 0, value, first)
    if variable.aggregation == "only_first_replica":
        return first
    if old.dtype.is_floating or old.dtype.is_complex:
        total = tf.add_n(list(rows))
        shares = [tf.cast(r / total, old.dtype) for r in rows]
        return tf.add_n([tf.math.multiply_no_nan(n, share) for n, share in zip(new, shares, strict=True)])
    agree = [
        tf.debugging.assert_equal(
            tf.where(count > 0, value, first),
            first,
            message=f"The variable {variable.path!r} ({old.dtype.name}) got different values on different "
            "towers, and integers are not averaged. It probably counts rows or looks at the batch. Create it "
            'with add_weight(..., aggregation="sum") if its changes add up, or "only_first_replica".',
        )
        for value, count in zip(new, rows, strict=True)
    ]
    with tf.control_dependencies([check for check in agree if check is not None]):
        return tf.identity(first)
