"""The exceptions that mgpu raises: one base, and one child for each thing a user can get wrong."""


class MgpuError(Exception):
    """Base of every error that mgpu raises on purpose."""

    # AutoGraph raises an error of a traced function again in the caller's class only if it can make one
    # from a message alone, which it reads off `__init__`.
    __init__ = Exception.__init__


class DeviceError(MgpuError, ValueError):
    """The devices asked for are not there, or are asked for in a way that cannot be read."""


class ModelError(MgpuError, ValueError):
    """The model cannot be trained on several towers with the plain model's numbers."""


class DataError(MgpuError, ValueError):
    """The data cannot be cut into one part per tower."""


class StrategyError(MgpuError, ValueError):
    """The strategy is unknown, or does not fit the devices or the model."""


class StagingError(MgpuError, RuntimeError):
    """A staging area is empty, full, closed, or was taken over."""


class LaunchError(MgpuError, RuntimeError):
    """The processes of a job, their launcher and their MPI do not fit together."""


class RankError(MgpuError, RuntimeError):
    """Another rank failed, left, does not come, or differs from this one."""
