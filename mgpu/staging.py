"""Decides where batches wait before a step: in first-in-first-out stores on the device that will use them."""

import itertools
import numbers
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mgpu.devices import resolve_devices, visible_devices
from mgpu.errors import DeviceError, StagingError

__all__ = ["StagingArea"]

_HOST = "/CPU:0"
# GPUs have no memory for these; their tensors exist on the host only.
_HOST_ONLY = (tf.string, tf.variant, tf.resource)
_POLL_S = 0.001
_serial = itertools.count()
# AutoGraph would rewrite these methods in every user's function, to no end.
_as_written = tf.autograph.experimental.do_not_convert


class StagingArea:
    """First-in-first-out store of batches that lives on one device.

    `put` copies a batch to the device, `get` takes the oldest one out. Used in one step function, a put for
    step k+1 and a get for step k depend on nothing of each other's, so the copy runs beside the step.
    It costs up to `depth` batches of device memory, one more while a put and a get of one step overlap.
    Batches stay until taken out, cleared or closed: close the area, or use it as a context manager.

    Everything works eagerly and inside `tf.function` (not under XLA). One thread may put while another gets.
    Several threads may do the same thing only eagerly: there a lock makes looking and acting one deed.
    A function traced before `close` no longer sees it: its gets time out, as on an empty area.

    Args:
        spec: what a batch looks like: a nested structure (dicts, lists, tuples) of `tf.TypeSpec`.
            Dimensions given as None may differ from batch to batch. A None in place of a spec stands
            for None in every batch.
        device: where the batches live, such as "/GPU:0". Strings and other tensors that exist
            on the host only wait on "/CPU:0" instead, in step with the rest.
        depth: most batches the area holds, 1 or more. 1 is enough to overlap copy and step.
        timeout_s: seconds that `put` waits for room, `get` and `peek` for a batch, before they raise.
            Inside a `tf.function` the error at run time is `tf.errors.InvalidArgumentError`.
        name: name for messages; None takes "staging". Areas of one name stay apart.

    Raises:
        StagingError: `spec` holds no spec or something else, or `depth` or `timeout_s` is out of range.
        DeviceError: `device` is not one device of this process.

    Source:
        TensorFlow's Stage, Unstage, StagePeek, StageSize and StageClear. Those block a thread of
        the runtime for ever when full or empty; here `depth` is kept by looking first, and waiting ends.

    Example:
        >>> import tensorflow as tf, mgpu
        >>> with mgpu.StagingArea(tf.TensorSpec([None], tf.float32), "/CPU:0") as area:
        ...     area.put([1.0, 2.0])
        ...     print(int(area.size()), area.get().numpy())
        1 [1. 2.]
    """

    def __init__(
        self, spec: Any, device: str, depth: int = 1, *, timeout_s: float = 60.0, name: str | None = None
    ) -> None:
        self._name = "staging" if name is None else str(name)
        self.depth = _checked_depth(depth, self._name)
        self.timeout_s = _checked_timeout(timeout_s, self._name)
        self.spec = _checked_spec(spec, self._name)
        self.device = _one_device(device)

        self._slots = tf.nest.flatten(spec, expand_composites=True)  # TensorSpecs, and None for None
        tensors = [(position, slot) for position, slot in enumerate(self._slots) if slot is not None]
        shared_name = f"mgpu_{self._name}_{next(_serial)}"
        stores = []
        for suffix, home, host_only in (("", self.device, False), ("_host", _HOST, True)):
            positions = [p for p, slot in tensors if (slot.dtype in _HOST_ONLY) is host_only]
            if positions:
                dtypes = [slot.dtype for p, slot in tensors if p in positions]
                stores.append(_Store(home, shared_name + suffix, positions, dtypes))
        # The first store tells the size. Puts fill it last and gets empty it first, so whoever
        # sees a batch in it finds the rest of that batch in the other one.
        self._stores = stores
        self._lock = threading.Lock()
        self._closed = False

    @_as_written
    def put(self, batch: Any) -> tf.Operation | None:
        """Add a batch, waiting up to `timeout_s` while the area is full.

        Args:
            batch: the structure of `spec`, holding tensors, arrays or Python numbers of its dtypes.

        Returns:
            None eagerly; in a `tf.function` the operation that stages the batch, which runs in any case.

        Raises:
            StagingError: the batch does not match `spec` (nothing is staged then), the area stayed
                full, or it is closed.
        """
        self._refuse_if_closed("put()")
        tensors = self._tensors(batch)
        return self._when(lambda size: size < self.depth, lambda: self._stage(tensors), "put()", self._full)

    @_as_written
    def get(self) -> Any:
        """Take out the oldest batch, waiting up to `timeout_s` while there is none.

        Returns:
            The structure of `spec`, its tensors on `device`, with the static shapes of `spec`.

        Raises:
            StagingError: the area stayed empty, or it is closed.
        """
        return self._when(lambda size: size > 0, self._unstage, "get()", self._empty)

    @_as_written
    def peek(self, index: int = 0) -> Any:
        """Return a batch without taking it out, waiting up to `timeout_s` until it is there.

        Args:
            index: 0 for the oldest batch, up to `depth` - 1.

        Returns:
            The structure of `spec`, as `get` returns it.

        Raises:
            StagingError: `index` is out of range, the batch did not come, or the area is closed.
        """
        call, index = self._checked_index(index)
        return self._when(lambda size: size > index, lambda: self._peek(index), call, self._empty)

    @_as_written
    def put_now(self, batch: Any) -> tf.Operation | None:
        """Add a batch without waiting; a pipeline that traces this makes sure itself that there is room.

        Args:
            batch: as for `put`.

        Returns:
            As `put`. A traced put into a full area makes it hold more than `depth`.

        Raises:
            StagingError: the batch does not match `spec`, the area is closed, or, eagerly, it is full.
        """
        self._refuse_if_closed("put_now()")
        tensors = self._tensors(batch)
        return self._now(lambda size: size < self.depth, lambda: self._stage(tensors), "put_now()", self._full)

    @_as_written
    def get_now(self) -> Any:
        """Take out the oldest batch without waiting; a pipeline that traces this makes sure there is one.

        Returns:
            As `get`. A traced get from an empty area blocks a thread of TensorFlow until a batch comes.

        Raises:
            StagingError: the area is closed or, eagerly, empty.
        """
        return self._now(lambda size: size > 0, self._unstage, "get_now()", self._empty)

    @_as_written
    def peek_now(self, index: int = 0) -> Any:
        """Return a batch without taking it out or waiting; traced, it must be there, as for `get_now`.

        Args:
            index: 0 for the oldest batch, up to `depth` - 1.

        Returns:
            The structure of `spec`, as `get` returns it.

        Raises:
            StagingError: `index` is out of range, the area is closed or, eagerly, holds too few batches.
        """
        call, index = self._checked_index(index, "peek_now")
        return self._now(lambda size: size > index, lambda: self._peek(index), call, self._empty)

    @_as_written
    def size(self) -> tf.Tensor:
        """Return the number of batches in the area, () int32.

        Raises:
            StagingError: the area is closed.
        """
        self._refuse_if_closed("size()")
        return self._stores[0].size()

    def nbytes(self) -> int:
        """Return the bytes that the batches in the area take, on the device and on the host together.

        Counted from the batches themselves, so only eagerly and while no step takes batches out.

        Raises:
            StagingError: called inside a `tf.function`, or the area is closed.
        """
        self._refuse_if_closed("nbytes()")
        if not tf.executing_eagerly():
            raise StagingError(
                f"{self} was asked for nbytes() while a tf.function is traced; no batch has a size "
                "yet. Call nbytes() outside of it; inside, size() gives the number of batches."
            )
        with self._lock:
            batches = range(int(self._stores[0].size()))
            return sum(_num_bytes(t) for i in batches for store in self._stores for t in store.peek(i))

    @_as_written
    def clear(self) -> tf.Operation | None:
        """Drop all batches and free their memory.

        Returns:
            None eagerly; in a `tf.function` the operation, which runs in any case.

        Raises:
            StagingError: the area is closed.
        """
        self._refuse_if_closed("clear()")
        with self._lock:
            return self._clear()

    def close(self) -> None:
        """Drop all batches and refuse every later call; a call that waits raises. Closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with tf.init_scope():
                    self._clear()

    def __enter__(self) -> "StagingArea":
        self._refuse_if_closed("with")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StagingArea {self._name!r} on {self.device} (depth {self.depth})"

    # How calls wait. Eagerly the lock spans looking and acting; traced, control dependencies order them.

    def _when(
        self,
        ready: Callable[[Any], Any],
        act: Callable[[], Any],
        call: str,
        explain: Callable[[str, object, bool], str],
    ) -> Any:
        self._refuse_if_closed(call)
        if not tf.executing_eagerly():
            message = explain(call, "the number at the end", True)
            with tf.control_dependencies([self._traced_wait(ready, message)]):
                return act()
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            with self._lock:
                self._refuse_if_closed(call)
                size = int(self._stores[0].size())
                if ready(size):
                    return act()
            if time.monotonic() >= deadline_s:
                raise StagingError(explain(call, size, True))
            time.sleep(_POLL_S)

    def _now(
        self,
        ready: Callable[[Any], Any],
        act: Callable[[], Any],
        call: str,
        explain: Callable[[str, object, bool], str],
    ) -> Any:
        self._refuse_if_closed(call)
        if not tf.executing_eagerly():
            return act()
        with self._lock:
            self._refuse_if_closed(call)
            size = int(self._stores[0].size())
            if not ready(size):
                raise StagingError(explain(call, size, False))
            return act()

    def _traced_wait(self, ready: Callable[[Any], Any], message: str) -> tf.Operation:
        first = self._stores[0]
        with tf.device(_HOST):
            size = first.size()
            with tf.control_dependencies([size]):
                deadline_s = tf.timestamp() + self.timeout_s

            def keep_waiting(size: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(tf.logical_not(ready(size)), tf.timestamp() < deadline_s)

            def look_again(size: tf.Tensor) -> tf.Tensor:
                # Python sleeps: a loop without a pause takes a core from whoever fills the area.
                pause = tf.numpy_function(_pause, [size], tf.int32)
                with tf.control_dependencies([pause]):
                    return first.size()

            size = tf.while_loop(keep_waiting, look_again, [size], parallel_iterations=1)
            if isinstance(size, (list, tuple)):
                (size,) = size
            return tf.debugging.Assert(ready(size), [message, size])

    def _full(self, call: str, size: object, waited: bool) -> str:
        return (
            f"{self}: {call} found no room{self._waited(waited)}; batches in it: {size}. "
            "Batches are put more often than they are taken out, or the consumer has stopped. "
            f"Call get() once for each put(), or clear(), or make the area with depth={self.depth + 1}."
        )

    def _empty(self, call: str, size: object, waited: bool) -> str:
        return (
            f"{self}: {call} found too few batches{self._waited(waited)}; batches in it: {size}. "
            "Nothing was put before it, or the source of the batches has ended or failed. "
            f"Call put() once before each get(){', or raise timeout_s if the source is slow' * waited}."
        )

    def _waited(self, waited: bool) -> str:
        return f" within {self.timeout_s:g} s" if waited else ""

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise StagingError(
                f"{self}: {call} was called, but the area is closed. close() was called, or its `with` block "
                "was left, and the batches are gone. Make a new StagingArea(spec, device)."
            )

    def _checked_index(self, index: int, name: str = "peek") -> tuple[str, int]:
        call = f"{name}({index!r})"
        is_integer = isinstance(index, numbers.Integral) and not isinstance(index, bool)
        if not is_integer or not 0 <= index < self.depth:
            raise StagingError(
                f"{self}: {call} asks for a batch that can never be there; an index is an "
                f"integer from 0 (the oldest) to {self.depth - 1}. They are most likely counted "
                f"from 1, or from the end. Call {name}({self.depth - 1}) for the last one of a full area, "
                f"or {name}(0) for the oldest."
            )
        return call, int(index)

    # What calls do, without looking.

    def _stage(self, tensors: Sequence[tf.Tensor | None]) -> tf.Operation | None:
        op = None
        for store in reversed(self._stores):
            with tf.control_dependencies([] if op is None else [op]):
                op = store.put(tensors)
        return op

    def _unstage(self) -> Any:
        flat: list[tf.Tensor | None] = [None] * len(self._slots)
        taken: list[tf.Tensor] = []
        for store in self._stores:
            with tf.control_dependencies(taken[:1]):
                taken = store.get()
            self._place(flat, store, taken)
        return tf.nest.pack_sequence_as(self.spec, flat, expand_composites=True)

    def _peek(self, index: int) -> Any:
        flat: list[tf.Tensor | None] = [None] * len(self._slots)
        for store in self._stores:
            self._place(flat, store, store.peek(index))
        return tf.nest.pack_sequence_as(self.spec, flat, expand_composites=True)

    def _place(self, flat: list, store: "_Store", tensors: Sequence[tf.Tensor]) -> None:
        for position, tensor in zip(store.positions, tensors, strict=True):
            tensor.set_shape(self._slots[position].shape)
            flat[position] = tensor

    def _clear(self) -> tf.Operation | None:
        op = None
        for store in self._stores:
            with tf.control_dependencies([] if op is None else [op]):
                op = store.clear()
        return op

    def _tensors(self, batch: Any) -> list[tf.Tensor | None]:
        """Return the tensors of `batch` in the order of `_slots`, or refuse it."""
        flat: list[tf.Tensor | None] = []
        for path, spec, value in _pairs(self.spec, batch, "batch", self):
            if spec is None:
                flat.append(None)
            elif isinstance(spec, tf.TensorSpec):
                flat.append(_matching_tensor(value, spec, path, self))
            else:
                if not spec.is_compatible_with(value):
                    raise _mismatch(self, path, spec, value)
                flat += tf.nest.flatten(value, expand_composites=True)
        for slot, tensor in zip(self._slots, flat, strict=True):
            # The parts of a composite may differ from the spec's where the whole does not.
            if slot is not None and tensor is not None and tensor.dtype != slot.dtype:
                raise _mismatch(self, "batch", slot, tensor)
        return flat


class _Store(NamedTuple):
    """One buffer of TensorFlow's, holding those components of a batch that live on one device."""

    device: str
    shared_name: str
    positions: Sequence[int]
    dtypes: Sequence[tf.DType]

    def put(self, tensors: Sequence[tf.Tensor | None]) -> tf.Operation | None:
        with tf.device(self.device):
            return tf.raw_ops.Stage(values=[tensors[p] for p in self.positions], **self._buffer())

    def get(self) -> list[tf.Tensor]:
        with tf.device(self.device):
            return list(tf.raw_ops.Unstage(dtypes=self.dtypes, **self._buffer()))

    def peek(self, index: int) -> list[tf.Tensor]:
        with tf.device(_HOST):
            index = tf.constant(index, tf.int32)
        with tf.device(self.device):
            return list(tf.raw_ops.StagePeek(index=index, dtypes=self.dtypes, **self._buffer()))

    def size(self) -> tf.Tensor:
        with tf.device(self.device):
            return tf.raw_ops.StageSize(dtypes=self.dtypes, **self._buffer())

    def clear(self) -> tf.Operation | None:
        with tf.device(self.device):
            return tf.raw_ops.StageClear(dtypes=self.dtypes, **self._buffer())

    def _buffer(self) -> dict[str, Any]:
        # Whichever op runs first makes the buffer with its own attributes, so all must agree. The capacity is
        # unlimited (0) because Stage on a full buffer blocks a thread of the runtime until a get.
        return {"capacity": 0, "memory_limit": 0, "container": "", "shared_name": self.shared_name}


def _pairs(spec: Any, batch: Any, path: str, area: StagingArea) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, spec, value) for each leaf of `spec`, in the order of `tf.nest.flatten`."""
    if isinstance(spec, Mapping):
        if not isinstance(batch, Mapping) or set(spec) != set(batch):
            raise _mismatch(area, path, f"a dict with the keys {sorted(spec)}", batch)
        for key in sorted(spec):
            yield from _pairs(spec[key], batch[key], f"{path}[{key!r}]", area)
    elif isinstance(spec, (list, tuple)):
        kind = list if isinstance(spec, list) else tuple
        if not isinstance(batch, kind) or len(batch) != len(spec):
            raise _mismatch(area, path, f"a {kind.__name__} of length {len(spec)}", batch)
        for index, (inner, value) in enumerate(zip(spec, batch, strict=True)):
            yield from _pairs(inner, value, f"{path}[{index}]", area)
    else:
        if spec is None and batch is not None:
            raise _mismatch(area, path, None, batch)
        yield path, spec, batch


def _matching_tensor(value: Any, spec: tf.TensorSpec, path: str, area: StagingArea) -> tf.Tensor:
    tensor = value
    if not tf.is_tensor(value) or isinstance(value, tf.Variable):
        if value is None or isinstance(value, Mapping):
            raise _mismatch(area, path, spec, value)
        try:
            # On the host: TensorFlow would put an array on its first GPU, a detour for every other device.
            with tf.device(_HOST):
                tensor = tf.convert_to_tensor(value, None if hasattr(value, "dtype") else spec.dtype)
        except (TypeError, ValueError) as error:
            raise _mismatch(area, path, spec, value) from error
    if not isinstance(tensor, tf.Tensor) or tensor.dtype != spec.dtype:
        raise _mismatch(area, path, spec, tensor)
    if not spec.shape.is_compatible_with(tensor.shape):
        raise _mismatch(area, path, spec, tensor)
    return tensor


def _mismatch(area: StagingArea, path: str, expected: Any, value: Any) -> StagingError:
    found, remedy = _describe(value), "Put batches of that form, or make the area with a spec that fits them"
    if isinstance(expected, tf.TensorSpec):
        if isinstance(value, tf.Tensor):
            actual = tf.TensorSpec(value.shape, value.dtype)
            remedy = f"Make the area with {actual!r} there, or change the batch"
            if value.dtype != expected.dtype and not {value.dtype, expected.dtype} & set(_HOST_ONLY):
                remedy = f"Put tf.cast({path}, tf.{expected.dtype.name}) there"
        expected = repr(expected)
    return StagingError(
        f"{area}: put() takes at {path}: {expected}; found {found}. The spec was most likely made "
        "from other data, or with a fixed dimension where batches differ (write None for it). "
        f"{remedy}. Nothing was staged."
    )


def _describe(value: Any) -> str:
    if isinstance(value, tf.Tensor):
        return f"a tensor of shape {value.shape}, {value.dtype.name}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(value, key=str)}"
    if isinstance(value, (list, tuple)):
        return f"a {'list' if isinstance(value, list) else 'tuple'} of length {len(value)}"
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    return f"{type(value).__name__} {value!r}"


def _num_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * tensor.dtype.size


def _pause(size: np.ndarray) -> np.ndarray:
    time.sleep(_POLL_S)
    return size


def _one_device(device: str) -> str:
    try:
        if isinstance(device, str):
            return resolve_devices(device)[0]
    except DeviceError:
        pass
    seen = visible_devices()
    raise DeviceError(
        f"StagingArea(device={device!r}) is not a device of this process, which has: {', '.join(seen)}. "
        "It is most likely misspelled, or hidden by CUDA_VISIBLE_DEVICES. "
        f'Pass one of these names, such as device="{seen[0]}".'
    ) from None


def _checked_depth(depth: int, name: str) -> int:
    if isinstance(depth, numbers.Integral) and not isinstance(depth, bool) and depth >= 1:
        return int(depth)
    raise StagingError(
        f"StagingArea(name={name!r}, depth={depth!r}): found {type(depth).__name__} {depth!r}; it is "
        "the most batches the area holds, an integer of 1 or more. "
        "To train without staging, make no area; else pass depth=1."
    )


def _checked_timeout(timeout_s: float, name: str) -> float:
    is_number = isinstance(timeout_s, (int, float, np.number)) and not isinstance(timeout_s, bool)
    if is_number and timeout_s >= 0:  # NaN is not
        return float(timeout_s)
    raise StagingError(
        f"StagingArea(name={name!r}, timeout_s={timeout_s!r}): found {type(timeout_s).__name__} "
        f"{timeout_s!r}; it is how many seconds to wait, a number of 0 or more. "
        "Pass timeout_s=60.0, or leave it out."
    )


def _checked_spec(spec: Any, name: str) -> Any:
    leaves = tf.nest.flatten(spec)
    wrong = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, tf.TypeSpec)]
    if wrong or all(leaf is None for leaf in leaves):
        found = _describe(wrong[0]) if wrong else "no spec at all"
        raise StagingError(
            f"StagingArea(name={name!r}): spec must be a structure of tf.TypeSpec; found {found} in it. "
            "A batch or a shape was most likely passed in place of its spec. "
            "Pass the element_spec of a tf.data.Dataset, or tf.TensorSpec([None, 3], tf.float32)."
        )
    return spec
