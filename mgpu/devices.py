"""Decides which TensorFlow devices a model runs on: the `gpus` argument, resolved to device names."""

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu.errors import DeviceError

__all__ = ["get_available_gpus", "set_logical_cpu_devices"]

_LISTING = {
    "names": lambda index: f"/GPU:{index}",
    "ids": lambda index: index,
    "specs": lambda index: tf.DeviceSpec(device_type="GPU", device_index=index),
}
_TF_DEVICES = (tf.config.LogicalDevice, tf.config.PhysicalDevice)
# Every way to write a local device: "/gpu:0", "GPU:0", "/device:GPU:0", "/job:localhost/.../device:GPU:0".
_SPELLING = re.compile(
    r"(/job:localhost)?(/replica:0)?(/task:0)?/?((physical_)?device:)?(?P<kind>cpu|gpu):(?P<index>\d+)",
    re.IGNORECASE,
)


def get_available_gpus(n: int | None = None, *, spec: str = "names") -> list:
    """List the GPUs this process can use, at most `n`, without starting any device.

    Nothing is initialised and no GPU memory is taken, so memory growth can still be set after it, on the
    devices that `tf.config.list_physical_devices("GPU")` returns. The list counts what TensorFlow shows:
    it respects CUDA_VISIBLE_DEVICES and `tf.config.set_visible_devices`, and counts the logical devices
    that a GPU was divided into.

    Args:
        n: most devices to list, 0 or more; None lists all.
        spec: form of the items: "names" for "/GPU:0", "ids" for 0, "specs" for `tf.DeviceSpec`.

    Returns:
        The first `n` GPUs in TensorFlow's order; an empty list where no GPU is visible.

    Raises:
        DeviceError: `n` is not an integer of 0 or more, or `spec` is unknown.

    Example:
        >>> import mgpu
        >>> all(name.startswith("/GPU:") for name in mgpu.get_available_gpus())
        True
    """
    if not isinstance(spec, str) or spec not in _LISTING:
        raise DeviceError(
            f"get_available_gpus(spec={spec!r}) asks for a form that is not one of: {', '.join(_LISTING)}. "
            'It is most likely misspelled. Pass spec="names", or leave it out.'
        )
    if n is not None and (not _is_integer(n) or n < 0):
        raise DeviceError(
            f"get_available_gpus(n={n!r}) is not a count: found {type(n).__name__} {n!r}. "
            "It is the most devices to list, so an integer of 0 or more. Pass n=None to list all."
        )
    gpus = _names("GPU")
    return [_LISTING[spec](index) for index in range(len(gpus))][: None if n is None else int(n)]


def set_logical_cpu_devices(n: int) -> list[str]:
    """Divide the CPU into `n` logical devices, which stand in for GPUs where there are none.

    For tests and rehearsals: they share the same cores, so nothing gets faster. Call it before
    TensorFlow starts, which the first tensor does. Calling it again with the same `n` changes nothing.

    Args:
        n: number of logical CPU devices, 1 or more.

    Returns:
        Their names, "/CPU:0" to "/CPU:n-1".

    Raises:
        DeviceError: `n` is not an integer of 1 or more, this process has no visible CPU device, or
            TensorFlow has already started with another number.

    Example:
        >>> import mgpu
        >>> mgpu.set_logical_cpu_devices(4)
        ['/CPU:0', '/CPU:1', '/CPU:2', '/CPU:3']
    """
    if not _is_integer(n) or n < 1:
        raise DeviceError(
            f"set_logical_cpu_devices(n={n!r}) is not a number of devices: found {type(n).__name__} {n!r}. "
            "At least one CPU device must remain. Pass an integer of 1 or more, such as n=2."
        )
    n = int(n)
    found = _names("CPU")
    if len(found) == n:
        return found
    cpus = tf.config.get_visible_devices("CPU")
    if not cpus:
        raise DeviceError(
            f"set_logical_cpu_devices({n}) needs a CPU device; this process sees none. "
            'It was most likely hidden with tf.config.set_visible_devices([], "CPU"): remove that call.'
        )
    try:
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:
        raise DeviceError(
            f"set_logical_cpu_devices({n}) comes too late: TensorFlow has already started with "
            f"{len(found)} CPU device{'s' * (len(found) != 1)}: {', '.join(found)}. "
            "A tensor, a Keras model or a list of logical devices was most likely made before it. "
            f"Restart Python and call mgpu.set_logical_cpu_devices({n}) first, right after the imports."
        ) from error
    return _names("CPU")


def resolve_devices(gpus: Any, *, asked: str = "make_parallel(gpus={})") -> list[str]:
    """Return the device names that a `gpus` argument means, checked against what this process sees.

    Starts no device and hides none. TensorFlow, when it starts, takes memory on every GPU it can see,
    also on those that no tower runs on. To keep it off the others, set CUDA_VISIBLE_DEVICES before
    TensorFlow is imported; or, before it starts, call `tf.config.set_visible_devices(chosen, "GPU")`
    or `tf.config.experimental.set_memory_growth(gpu, True)` for each GPU.

    Args:
        gpus: None for all GPUs; a count of 1 or more for the first ones; 0 for "/CPU:0" alone;
            or one device or a list of devices, each an id or a name in any usual spelling, a
            `tf.DeviceSpec`, or a logical or physical device from `tf.config`. Where no GPU is visible,
            and only there, the logical CPU devices stand in for None, counts and ids.
        asked: how the user wrote the request, `{}` standing for the value; used in messages.

    Returns:
        Names such as "/GPU:1" or "/CPU:0", all different, in the order asked for.

    Raises:
        DeviceError: the request names no device, one that cannot be read, one twice, or one that is
            not there.
    """
    return choose_devices(
        gpus,
        visible=visible_devices(),
        mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        physical=_logical_names_of_physical(),
        asked=asked,
    )


def choose_devices(
    gpus: Any,
    *,
    visible: Sequence[str],
    mask: str | None = None,
    physical: Mapping[str, Sequence[str]] | None = None,
    asked: str = "make_parallel(gpus={})",
) -> list[str]:
    """Return the devices that `gpus` means among `visible`: `resolve_devices` as a pure function.

    Args:
        gpus: as for `resolve_devices`.
        visible: canonical names of all local devices, such as ["/GPU:0", "/CPU:0"].
        mask: the value of CUDA_VISIBLE_DEVICES, None where it is not set. Only quoted in messages.
        physical: names in `visible` for each physical device's name. Needed where the numbers differ.
        asked: as for `resolve_devices`.

    Returns:
        Names out of `visible`.

    Raises:
        DeviceError: as for `resolve_devices`.
    """
    seen_gpus = [name for name in visible if name.startswith("/GPU:")]
    pool = seen_gpus or [name for name in visible if name.startswith("/CPU:")]
    request = _Request(_spell(gpus), asked, pool, seen_gpus, mask)

    if gpus is None:
        if not pool:
            raise request.error("this process has no device to run on", "Make a device visible to TensorFlow")
        return list(pool)
    if _is_integer(gpus):
        return _first(int(gpus), request, visible)
    # TensorFlow's own devices are named tuples.
    if isinstance(gpus, (list, tuple, range)) and not isinstance(gpus, _TF_DEVICES):
        if not len(gpus):
            raise request.error("An empty list names no device", f"Pass {request.all_devices()}")
        items = list(gpus)
    else:
        items = [gpus]

    chosen: list[str] = []
    for item in items:
        chosen += _read(item, request, visible, physical or {})
    if len(set(chosen)) < len(chosen):
        twice = sorted({name for name in chosen if chosen.count(name) > 1})
        raise request.error(
            f"It names {', '.join(twice)} more than once, maybe in two spellings; a device runs one tower",
            f"Pass gpus={list(dict.fromkeys(chosen))}",
        )
    return chosen


class _Request:
    """What the user asked for and what there is: the two parts that every refusal quotes."""

    def __init__(self, spelled: str, asked: str, pool: Sequence[str], gpus: Sequence[str], mask: str | None) -> None:
        self.pool, self.gpus, self.mask = pool, gpus, mask
        self._asked = asked.format(spelled)

    def error(self, cause: str, remedy: str) -> DeviceError:
        mask = "not set" if self.mask is None else repr(self.mask)
        if self.gpus:
            count = f"{len(self.gpus)} GPU{'s' * (len(self.gpus) != 1)}"
            seen = f"this process sees {count}: {', '.join(self.gpus)}"
        else:
            seen = f"this process sees no GPU, only {', '.join(self.pool) or 'nothing'}"
        return DeviceError(f"{self._asked}: {seen} (CUDA_VISIBLE_DEVICES: {mask}). {cause}. {remedy}.")

    def all_devices(self) -> str:
        """Return the argument that takes every device there is, with what that means."""
        kind = "GPU" if self.gpus else "CPU device"
        return f"gpus=None to use {'the one' if len(self.pool) == 1 else f'all {len(self.pool)}'} {kind}" + (
            "s" * (len(self.pool) > 1)
        )

    def reveal(self, num_gpus: int) -> str:
        """Return how more GPUs, or stand-ins for them, can come into view."""
        if self.mask is not None:
            hint = f"check that CUDA_VISIBLE_DEVICES lists {num_gpus} ids before TensorFlow is imported"
        else:
            hint = "compare with nvidia-smi"
        if self.gpus:
            return hint
        return f"{hint}, or to rehearse on the CPU call mgpu.set_logical_cpu_devices({num_gpus}) first"


def _first(count: int, request: _Request, visible: Sequence[str]) -> list[str]:
    if count < 0:
        raise request.error("A count of devices cannot be negative", f"Pass {request.all_devices()}")
    if count == 0:
        if "/CPU:0" not in visible:
            raise request.error("0 means the CPU alone, and it is hidden", f"Pass {request.all_devices()}")
        return ["/CPU:0"]
    if count > len(request.pool):
        kind = "GPUs are" if request.gpus else "devices are"
        cause = f"More {kind} asked for than are visible"
        if not request.gpus:
            cause += "; the GPUs are hidden, or this TensorFlow is built without them"
        raise request.error(cause, f"Pass {request.all_devices()}, or {request.reveal(count)}")
    return list(request.pool[:count])


def _read(item: Any, request: _Request, visible: Sequence[str], physical: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names that one item of `gpus` means: one, or a divided physical device's several."""
    if _is_integer(item):
        if 0 <= item < len(request.pool):
            return [request.pool[int(item)]]
        last = len(request.pool) - 1
        cause = f"There is no id {int(item)}: ids count the visible devices from 0, so the last is {last}"
        reveal = request.reveal(int(item) + 1) if item >= 0 else f"gpus=[{last}] for the last one"
        raise request.error(cause, f"Pass {request.all_devices()}, or {reveal}")

    text = item
    if isinstance(item, _TF_DEVICES):
        text = item.name
    elif isinstance(item, tf.DeviceSpec):
        text = item.to_string()
    if not isinstance(text, str):
        form = f"gpus={int(item)}" if _is_whole(item) and 1 <= item <= len(request.pool) else None
        raise request.error(
            f"{_spell(item)} ({type(item).__name__}) is neither a count, an id nor a device name",
            f"Pass {form or request.all_devices()}",
        )
    if text in physical:
        return list(physical[text])

    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        cause = f"{text!r} is not the name of a local CPU or GPU with its number"
        if "XLA_" in text.upper():
            cause = f"{text!r} is an old TensorFlow's second name for a device; towers run on the plain one"
        example = f"gpus={request.pool[0]!r} for the first device, or " if request.pool else ""
        raise request.error(cause, f"Pass {example}{request.all_devices()}")
    name = f"/{match['kind'].upper()}:{int(match['index'])}"
    if name not in visible:
        cause = f"There is no {name}: numbers count the visible devices of a kind from 0"
        reveal = request.reveal(int(match["index"]) + 1)
        if match["kind"].upper() == "CPU":
            reveal = f"call mgpu.set_logical_cpu_devices({int(match['index']) + 1}) first"
        raise request.error(cause, f"Pass {request.all_devices()}, or {reveal}")
    return [name]


def _is_integer(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return False
    try:
        operator.index(value)
    except TypeError:  # an array or a tensor that is not one integer
        return False
    return not hasattr(value, "ndim") or isinstance(value, np.integer)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (
        isinstance(value, (float, np.floating)) and bool(np.isfinite(value)) and float(value).is_integer()
    )


def _spell(gpus: Any) -> str:
    """Return `gpus` as the user is likely to have written it."""
    if isinstance(gpus, _TF_DEVICES):
        return repr(gpus)
    if isinstance(gpus, (list, tuple)):
        inside = ", ".join(_spell(item) for item in gpus)
        return f"[{inside}]" if isinstance(gpus, list) else f"({inside}{',' * (len(gpus) == 1)})"
    return str(gpus) if isinstance(gpus, np.generic) else repr(gpus)


def visible_devices() -> list[str]:
    """Return the names of all local devices, GPUs first, without starting any."""
    return [*_names("GPU"), *_names("CPU")]


def _names(kind: str) -> list[str]:
    num = sum(_num_parts(device) for device in tf.config.get_visible_devices(kind))
    return [f"/{kind}:{index}" for index in range(num)]


def _num_parts(device: tf.config.PhysicalDevice) -> int:
    # TensorFlow freezes this configuration when it starts, so it tells the logical devices before and
    # after; list_logical_devices() would start them all.
    return len(tf.config.get_logical_device_configuration(device) or [None])


def _logical_names_of_physical() -> dict[str, list[str]]:
    homes: dict[str, list[str]] = {}
    for kind in ("GPU", "CPU"):
        names: Callable[[], str] = iter(_names(kind)).__next__
        for device in tf.config.get_visible_devices(kind):
            homes[device.name] = [names() for _ in range(_num_parts(device))]
    return homes
