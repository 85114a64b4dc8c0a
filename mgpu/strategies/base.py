"""The contract between the towers of a step, on all ranks, and the weights that they train.

T = towers of this rank, V = trainable variables. `contributions[t][v]` is tower t's summand of the gradient of
variable v.
"""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mgpu.cluster.world import Alone, World
from mgpu.errors import StrategyError


class GradientStrategy(abc.ABC):
    """Says where each variable lives, and adds up what the towers found.

    The towers scale their gradients by the whole batch's denominators before the backward pass ends, so
    combining is a plain sum: the number of towers appears nowhere.
    """

    name: str

    @property
    def world(self) -> World:
        """The ranks that train together: this one alone, unless a strategy says otherwise."""
        return _ALONE

    def describe(self) -> str:
        """Return what is done with the gradients, for the line that is printed when training starts."""
        return self.name

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

    # ---- over ranks: nothing to do for one

    def exchange(
        self, gradients: Sequence[Any], riders: Sequence[tf.Tensor], share: tf.Tensor
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Return the sums over ranks of what `combine` returned, and of small tensors that travel along.

        Args:
            gradients: V tensors, IndexedSlices or None, this rank's summands.
            riders: this rank's summands of losses, counts, statistics and metric changes.
            share: scalar float32, this rank's part of the rows of the step.
        """
        return list(gradients), list(riders)

    def sum_over_ranks(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return the sums over ranks of some small tensors, in one exchange called `name`."""
        return list(tensors)

    def gather_over_ranks(self, tensor: Any, name: str) -> Any:
        """Return the tensors (rows, ...) of all ranks, one after the other."""
        return tensor


_ALONE = Alone()


def sum_with_gradient(strategy: GradientStrategy, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return the sums over ranks of `tensors`, through which gradients flow to all summands.

    A rank differentiates the part of the loss that its own rows make; what another rank's part owes to this
    rank's summand comes back by summing the gradients over ranks, too.
    """
    if strategy.world.size == 1:
        return list(tensors)

    @tf.custom_gradient
    def total(*summands: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return strategy.sum_over_ranks(upstream, f"{name}_gradient")

        return strategy.sum_over_ranks(summands, name), gradient

    return list(total(*tensors))


def sum_of_own(strategy: GradientStrategy, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return the sums over ranks of `tensors`, through which gradients flow to this rank's summands alone."""
    if strategy.world.size == 1 or not tensors:
        return list(tensors)
    totals = strategy.sum_over_ranks([tf.stop_gradient(t) for t in tensors], name)
    return [own + (total - tf.stop_gradient(own)) for own, total in zip(tensors, totals, strict=True)]
