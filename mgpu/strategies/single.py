"""Gradient strategy "single": one tower, nothing to combine."""

from collections.abc import Sequence

from mgpu.strategies.base import GradientStrategy


class SingleDevice(GradientStrategy):
    """The null strategy: the variables live on the only tower, or on `device`.

    Chosen for one device, so that no caller has to ask whether there are several. Moves no bytes.

    Args:
        device: TensorFlow device that stores the weights; the default is the tower itself.
    """

    name = "single"

    def __init__(self, device: str | None = None) -> None:
        self._device = device

    def assign_homes(self, sizes_bytes: Sequence[int], towers: Sequence[str]) -> list[str]:
        return [self._device or towers[0]] * len(sizes_bytes)
