"""How the towers' gradients meet. `resolve` turns the `strategy` argument into one of them."""

from collections.abc import Sequence

from mgpu.devices import resolve_devices
from mgpu.errors import StrategyError
from mgpu.strategies.base import GradientStrategy
from mgpu.strategies.parameter_server import ParameterServer
from mgpu.strategies.single import SingleDevice

__all__ = ["GradientStrategy", "ParameterServer", "SingleDevice", "resolve"]

_NAMES = ("auto", "single", "parameter_server")


def resolve(
    strategy: str | GradientStrategy, ps_device: str | Sequence[str], towers: Sequence[str]
) -> GradientStrategy:
    """Return the strategy that `make_parallel(strategy=..., ps_device=...)` asks for.

    Raises:
        StrategyError: an unknown name, an instance together with `ps_device`, or "single" for several towers.
    """
    chosen: GradientStrategy
    if isinstance(strategy, GradientStrategy):
        if ps_device != "auto":
            raise StrategyError(
                f"make_parallel(strategy={type(strategy).__name__}(...), ps_device={ps_device!r}) says twice where "
                f"the weights live. Pass ps_device to the strategy: ParameterServer({ps_device!r})."
            )
        chosen = strategy
    elif strategy not in _NAMES:
        raise StrategyError(
            f"make_parallel(strategy={strategy!r}) is not a strategy. Use one of "
            f"{', '.join(map(repr, _NAMES))}, or an instance such as mgpu.ParameterServer('/CPU:0')."
        )
    elif strategy == "single" or (strategy == "auto" and len(towers) == 1 and ps_device == "auto"):
        chosen = SingleDevice(None if ps_device in ("auto", "spread") else _one_device(ps_device))
    else:
        chosen = ParameterServer(ps_device)
    if isinstance(chosen, SingleDevice) and len(towers) > 1:
        raise StrategyError(
            f"make_parallel(strategy='single') is for one tower; there are {len(towers)}: {', '.join(towers)}. "
            "Pass gpus=1, or strategy='parameter_server'."
        )
    return chosen


def _one_device(ps_device: str | Sequence[str]) -> str:
    devices = resolve_devices(ps_device, asked="make_parallel(ps_device={})")
    if len(devices) > 1:
        raise StrategyError(
            f"make_parallel(strategy='single', ps_device={ps_device!r}) names {len(devices)} devices for the weights "
            f"of one tower. Pass one, ps_device={devices[0]!r}, or strategy='parameter_server' to divide them."
        )
    return devices[0]
