"""Gradient strategy "parameter_server": sum on the device that holds the one copy of each weight."""

import heapq
from collections.abc import Sequence

from mgpu.devices import resolve_devices
from mgpu.errors import StrategyError
from mgpu.strategies.base import GradientStrategy


class ParameterServer(GradientStrategy):
    """Keep one copy of each weight, and sum the towers' gradients where it lives.

    Every tower reads the weights once a step and sends one gradient back, so a step moves 2 T copies of
    the weights over the links of `device`. Choose one device when the weights are small next to the
    activations. Choose "spread" when they are not: variables, optimizer slots and sums are divided over the
    towers by bytes, and each link carries what it would carry in a ring allreduce.

    Args:
        device: "auto" (the first tower), a TensorFlow device such as "/CPU:0", a list of devices over which
            the variables are divided by bytes, or "spread" (divided over the towers).

    Raises:
        DeviceError: there is no such device.
        StrategyError: `device` is an empty list.
    """

    name = "parameter_server"

    def __init__(self, device: str | Sequence[str] = "auto") -> None:
        if not isinstance(device, str) and not device:
            raise StrategyError(
                f"ParameterServer(device={device!r}) names no device. Pass a device such as '/CPU:0', "
                "or 'spread' to divide the variables over the towers."
            )
        self._device = (
            device if device in ("auto", "spread") else tuple(resolve_devices(device, asked="ParameterServer({})"))
        )

    def assign_homes(self, sizes_bytes: Sequence[int], towers: Sequence[str]) -> list[str]:
        if self._device == "auto":
            return [towers[0]] * len(sizes_bytes)
        devices = list(towers) if self._device == "spread" else list(self._device)
        return _balanced(sizes_bytes, devices)


def _balanced(sizes_bytes: Sequence[int], devices: Sequence[str]) -> list[str]:
    """Give the largest variable left to the device with the fewest bytes, until none is left.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": largest first is within 4/3 of the
    best division.
    """
    loads = [(0, rank) for rank in range(len(devices))]
    homes = [""] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        load, rank = heapq.heappop(loads)
        homes[index] = devices[rank]
        heapq.heappush(loads, (load + sizes_bytes[index], rank))
    return homes
