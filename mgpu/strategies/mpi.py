"""Gradient strategy "mpi": sums over ranks by mpi4py, with nothing to compile.

The graph calls host functions: one that begins a non-blocking allreduce, one that waits for it. MPI matches the
collectives of ranks by the order in which they begin, and a graph has none, so each is made to wait for the one
that was traced before it: ranks that trace the same program then begin them in the same order.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from mgpu.cluster.world import MpiWorld
from mgpu.strategies.allreduce import AllreduceStrategy

# How often a thread looks after exchanges that run beside the backward pass: MPI moves data only inside its calls.
_PROGRESS_S = 2e-4
# The name of the last exchange that was traced into each graph, by any strategy: two optimizers of one step, begun
# in another order on another rank, would wait for each other for ever.
_last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class MPI(AllreduceStrategy):
    """Sum gradients over ranks by mpi4py's non-blocking Allreduce on flat buffers of host memory.

    Choose it for CPU clusters and where nothing can be compiled: it needs mpi4py and an MPI library. On GPUs
    every gradient goes through the host. A step moves about two copies of the gradients in and out of each rank.

    Args:
        bucket_bytes, compression, error_feedback, sparse_as_dense, process_set, ps_device: as for
            `AllreduceStrategy`.

    Raises:
        StrategyError: an argument has a value that it cannot have.
        LaunchError: when training starts, mpi4py is missing or belongs to another MPI than the launcher.
    """

    name = "mpi"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._channel: _Channel | None = None

    def _channel_of_world(self) -> "_Channel":
        if self._channel is None:
            world = self.world
            if not isinstance(world, MpiWorld):
                raise TypeError(f"an exchange over ranks needs MPI; the group is {world!r}")
            self._channel = _Channel(world)
        return self._channel

    def _start(self, flat: tf.Tensor, name: str) -> Callable[[], tf.Tensor]:
        channel = self._channel_of_world()
        with tf.device("/CPU:0"):
            handle = self._in_order(
                lambda: tf.numpy_function(lambda array: channel.begin(array, name), [flat], tf.int64)
            )

        def finish() -> tf.Tensor:
            with tf.device("/CPU:0"):
                total = self._in_order(lambda: tf.numpy_function(channel.end, [handle], flat.dtype))
            return tf.ensure_shape(total, flat.shape)

        return finish

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        channel = self._channel_of_world()
        with tf.device("/CPU:0"):
            every = self._in_order(
                lambda: tf.numpy_function(lambda array: channel.gather(array, name), [tensor], tensor.dtype)
            )
        return tf.ensure_shape(every, tf.TensorShape([None]).concatenate(tensor.shape[1:]))

    def _branch(self, predicate: tf.Tensor, yes: Callable, no: Callable) -> Any:
        return self._in_order(lambda: tf.cond(predicate, yes, no))

    def _in_order(self, make: Callable[[], Any]) -> Any:
        """Make an exchange that begins after the one that was made before it in the same graph."""
        if tf.executing_eagerly():
            return make()
        graph = tf.compat.v1.get_default_graph()
        before = _last.get(graph)
        with tf.control_dependencies([] if before is None else [graph.get_operation_by_name(before)]):
            made = make()
        _last[graph] = tf.nest.flatten(made)[0].op.name
        return made


class _Channel:
    """The exchanges of one communicator that are under way. Called by TensorFlow's threads."""

    def __init__(self, world: MpiWorld) -> None:
        from mpi4py import MPI as mpi

        self._mpi = mpi
        self._world = world
        self._comm = world.comm.Dup()
        self._half_sums = {
            np.dtype(np.float16): mpi.Op.Create(_adder(np.float16), commute=True),
            np.dtype(ml_dtypes.bfloat16): mpi.Op.Create(_adder(ml_dtypes.bfloat16), commute=True),
        }
        self._pending: dict[int, tuple[Any, np.ndarray, str]] = {}
        self._next = 0
        self._some = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, array: np.ndarray, name: str) -> np.int64:
        """Begin to sum `array` over ranks. Returns the number to pass to `end`."""
        buffer = array if array.flags.owndata and array.flags.writeable else array.copy()
        half = self._half_sums.get(buffer.dtype)
        if half is None:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, buffer)
        else:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, [buffer.view(np.uint16), self._mpi.UINT16_T], op=half)
        with self._some:
            key = self._next
            self._next += 1
            self._pending[key] = (request, buffer, name)
            if len(self._pending) > 1 and self._thread is None:
                self._thread = threading.Thread(target=self._progress, name="mgpu-mpi", daemon=True)
                self._thread.start()
            self._some.notify()
        return np.int64(key)

    def end(self, key: np.int64) -> np.ndarray:
        """Return the sum that was begun as `key`."""
        with self._some:
            request, buffer, name = self._pending.pop(int(key))
        self._world.wait(request, name)
        return buffer

    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Return the arrays of all ranks, one after the other."""
        if array.dtype == object:  # strings
            return np.concatenate(self._world.gather(array, name))
        size = self._world.size
        rows = np.zeros(size, np.int64)
        self._world.wait(self._comm.Iallgather(np.array([array.shape[0]], np.int64), rows), name)
        every = np.empty((int(rows.sum()), *array.shape[1:]), array.dtype)
        row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        sent = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        received = every.reshape(-1).view(np.uint8)
        self._world.wait(self._comm.Iallgatherv(sent, [received, rows * row_bytes]), name)
        return every

    def _progress(self) -> None:
        """Look after what was begun, while the graph computes."""
        while True:
            with self._some:
                self._some.wait_for(lambda: self._pending)
                requests = [request for request, _, _ in self._pending.values()]
            for request in requests:
                self._mpi.Request.Get_status(request)
            time.sleep(_PROGRESS_S)


def _adder(dtype: Any) -> Callable[[Any, Any, Any], None]:
    def add(source: Any, target: Any, _: Any) -> None:
        total = np.frombuffer(target, dtype)
        np.add(total, np.frombuffer(source, dtype), out=total)

    return add
