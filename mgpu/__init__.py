"""Data-parallel training of Keras 3 models on TensorFlow: `model = mgpu.make_parallel(model, gpus=4)`."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Resolved on first use, so that `import mgpu` loads
# neither TensorFlow nor Keras, and devices can still be configured after it.
_HOMES = {
    "make_parallel": "mgpu.parallel",
    "get_available_gpus": "mgpu.devices",
    "set_logical_cpu_devices": "mgpu.devices",
    "StagingArea": "mgpu.staging",
    "ParameterServer": "mgpu.strategies",
    "SingleDevice": "mgpu.strategies",
    "rowwise": "mgpu.losses",
    "additive": "mgpu.metrics",
    "MgpuError": "mgpu.errors",
    "DeviceError": "mgpu.errors",
    "ModelError": "mgpu.errors",
    "DataError": "mgpu.errors",
    "StrategyError": "mgpu.errors",
    "StagingError": "mgpu.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mgpu' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
