"""The contract between the towers of a step and the one copy of the weights that they train.

T = towers, V = trainable variables. `contributions[t][v]` is tower t's summand of the gradient of variable v.
"""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mgpu.errors import StrategyError


class GradientStrategy(abc.ABC):
    """Says where each variable lives, and adds up what the towers found.

    The towers scale their gradients by the whole batch's denominators before the backward pass ends, so
    combining is a plain sum: the number of towers appears nowhere.
    """

    name: str

    @abc.abstractmethod
    def assign_homes(self, sizes_bytes: Sequence[int], towers: Sequence[str]) -> list[str]:
        """Return the device on which each variable lives.

        Args:
            sizes_bytes: the size of each variable, in the model's order.
            towers: T device names.

        Returns:
            One device name for each entry of `sizes_bytes`.
        """

    def combine(
        self, contributions: Sequence[Sequence[Any]], homes: Sequence[str]
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Return the gradient of the whole batch: the sum of the towers' contributions.

        Args:
            contributions: T lists of V tensors, IndexedSlices or None; `contributions[t][v]` has the shape
                and dtype of variable v.
            homes: V device names.

        Returns:
            V gradients, each on the home of its variable. Sparse where every tower's is sparse: the slices
            of all towers one after the other, which Keras' optimizers sum over duplicates once. None where
            every tower has None.

        Raises:
            StrategyError: the towers return different numbers of gradients, or one has a gradient for a
                variable where another has None.
        """
        counts = [len(tower) for tower in contributions]
        if len(set(counts)) != 1 or counts[0] != len(homes):
            raise StrategyError(
                f"The towers return different numbers of gradients: {counts} for {len(homes)} variables. "
                "A layer that runs on some towers only is the usual cause; build the model once, outside "
                "any device scope, and pass it to make_parallel()."
            )
        return [
            self._sum(per_tower, home) for per_tower, home in zip(zip(*contributions, strict=True), homes, strict=True)
        ]

    def _sum(self, per_tower: Sequence[Any], home: str) -> tf.Tensor | tf.IndexedSlices | None:
        missing = [gradient is None for gradient in per_tower]
        if all(missing):
            return None
        if any(missing):
            raise StrategyError(
                f"Tower {missing.index(True)} has no gradient for a variable that other towers have one for. "
                "The layer probably runs on some towers only; call it for every batch."
            )
        with tf.device(home):
            if len(per_tower) == 1:
                return per_tower[0]
            if all(isinstance(gradient, tf.IndexedSlices) for gradient in per_tower):
                return tf.IndexedSlices(
                    values=tf.concat([gradient.values for gradient in per_tower], axis=0),
                    indices=tf.concat([gradient.indices for gradient in per_tower], axis=0),
                    dense_shape=per_tower[0].dense_shape,
                )
            return tf.add_n([tf.convert_to_tensor(gradient) for gradient in per_tower])
