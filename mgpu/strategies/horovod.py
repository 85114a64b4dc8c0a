"""Gradient strategy "horovod": sums over ranks by Horovod's TensorFlow operations.

Only the low-level operations of `horovod.tensorflow` are used: `horovod.keras` averages nothing on Keras 3.
"""

import collections
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mgpu.cluster.world import World
from mgpu.errors import StrategyError
from mgpu.strategies.allreduce import DEFAULT_BUCKET_BYTES, AllreduceStrategy

# Horovod's background thread looks for new work this often. Its default of 1 ms is a large part of a small step.
_CYCLE_TIME_MS = "0.1"
# Numbers the strategies of a process: two optimizers of one step exchange at the same time.
_numbers = itertools.count(1)


def is_installed() -> bool:
    """Return whether Horovod with its TensorFlow operations can be loaded."""
    try:
        import horovod.tensorflow  # noqa: F401
    except Exception:  # noqa: BLE001 a build for another TensorFlow fails in its own ways
        return False
    return True


class Horovod(AllreduceStrategy):
    """Sum gradients over ranks by Horovod.

    Choose it for many ranks or GPUs (built with NCCL): its operations are part of the graph, so the exchange
    overlaps with the backward pass. It has to be compiled once: `mgpu horovod install`. A step moves about two
    copies of the gradients in and out of each rank.

    Args:
        bucket_bytes, compression, error_feedback, sparse_as_dense, process_set, ps_device: as for
            `AllreduceStrategy`. Horovod has no sum in "bfloat16": those gradients are gathered and summed by each
            rank, which moves one half-size copy per rank.
        op: "sum", the law; or "adasum", which adds the ranks' mean gradients so that parallel ones are averaged
            and orthogonal ones summed. It is another training, not the plain model's.
            Source: Maleki et al. 2020, arXiv:2006.02924.

    Raises:
        StrategyError: an argument has a value that it cannot have; or, when training starts, Horovod is not
            installed, or counts other ranks than MPI.
    """

    name = "horovod"

    def __init__(
        self,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        compression: str | None = None,
        error_feedback: bool = False,
        op: str = "sum",
        sparse_as_dense: bool | None = None,
        process_set: Sequence[int] | None = None,
        ps_device: str | Sequence[str] = "auto",
    ) -> None:
        super().__init__(
            ps_device=ps_device,
            bucket_bytes=bucket_bytes,
            compression=compression,
            error_feedback=error_feedback,
            sparse_as_dense=True if op == "adasum" else sparse_as_dense,
            process_set=process_set,
        )
        if op not in ("sum", "adasum"):
            raise StrategyError(
                f"Horovod(op={op!r}) is not a way to combine gradients. Pass op='sum' (the plain model's numbers; an "
                "average over ranks is part of it, by rows) or op='adasum'."
            )
        self._op = op
        self._hvd: Any = None
        self._set: Any = None
        self._number: int | None = None
        # How often each name was used in a graph.
        self._uses: weakref.WeakKeyDictionary[Any, collections.Counter] = weakref.WeakKeyDictionary()

    def describe(self) -> str:
        return super().describe() + (", adasum" if self._op == "adasum" else "")

    def _check_world(self, world: World) -> None:
        if world.size == 1:
            return
        try:
            # Read when Horovod starts. A stall then ends in an error on every rank, after what mgpu waits.
            os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE_TIME_MS)
            os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(world.timeout_s))))
            os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(1, int(world.timeout_s)) + 1))
            import horovod.tensorflow as hvd
        except Exception as error:
            from mgpu.cluster.horovod_build import missing_message

            raise StrategyError(
                f"strategy='horovod' was asked for; Horovod cannot be loaded: {error}. {missing_message()}"
            ) from error
        if not hvd.is_initialized():
            hvd.init()
        whole = world.launch.size
        if hvd.size() != whole:
            raise StrategyError(
                f"Horovod counts {hvd.size()} ranks, MPI {whole}: they were built for different MPIs, or Horovod was "
                "started for a part of the ranks. Build it against this MPI: mgpu horovod install --force"
            )
        if self._op == "adasum" and world.size & (world.size - 1):
            raise StrategyError(
                f"Horovod(op='adasum') pairs ranks up; there are {world.size}, which is not a power of 2. Start 2, 4, "
                "8, ... ranks, or use op='sum'."
            )
        self._set = hvd.global_process_set
        if world.size < whole:
            # Every rank of the job takes part in making a set, which ranks outside of it do not.
            raise StrategyError(
                f"Horovod(process_set={self._process_set}) names {world.size} of {whole} ranks; Horovod makes a set "
                "only with all of them. Use mgpu.MPI(process_set=...), or start a job of that size."
            )
        self._hvd = hvd

    def _options(self, name: str) -> dict[str, Any]:
        """Return the options of an operation: Horovod matches those of the ranks by name, so none is used twice.

        The number of this strategy is rank 0's, for ranks may have made different numbers of strategies. Scopes are
        ignored, for they differ where a rank has built more layers or optimizers.
        """
        if self._number is None:
            self._number = self.world.broadcast(next(_numbers), what="the first exchange of a Horovod strategy")
        name = f"mgpu{self._number}_{name}"
        if not tf.executing_eagerly():
            uses = self._uses.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
            uses[name] += 1
            name += f"_use_{uses[name]}" if uses[name] > 1 else ""
        return {"name": name, "ignore_name_scope": True, "process_set": self._set}

    def _start(self, flat: tf.Tensor, name: str) -> Callable[[], tf.Tensor]:
        world, hvd = self.world, self._hvd
        if flat.dtype == tf.bfloat16:
            # Gathered as bytes.
            every = hvd.allgather(tf.bitcast(flat, tf.uint8), **self._options(name))
            copies = tf.reshape(tf.bitcast(every, tf.bfloat16), [world.size, -1])
            return lambda: tf.reduce_sum(tf.cast(copies, tf.float32), axis=0)
        total = hvd.mpi_ops._allreduce(flat, op=hvd.Sum, **self._options(name))
        return lambda: total

    def exchange(
        self, gradients: Sequence[Any], riders: Sequence[tf.Tensor], share: tf.Tensor
    ) -> tuple[list[Any], list[tf.Tensor]]:
        if self._op != "adasum" or self.world.size == 1:
            return super().exchange(gradients, riders, share)
        hvd, out = self._hvd, list(gradients)
        given = [i for i, g in enumerate(gradients) if g is not None]
        means = [
            tf.math.divide_no_nan(tf.convert_to_tensor(gradients[i]), tf.cast(share, gradients[i].dtype)) for i in given
        ]
        wire = COMPRESSED.get(self._compression or "")
        for i, mean in zip(given, means, strict=True):
            sent = mean if wire is None else tf.cast(mean, wire)
            total = hvd.mpi_ops._allreduce(sent, op=hvd.Adasum, **self._options(f"adasum_{i}"))
            out[i] = tf.cast(total, mean.dtype)
        return out, self.sum_over_ranks(riders, "state")

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allgather(tensor, **self._options(name))


# Horovod's Adasum works in these.
COMPRESSED = {"float16": tf.float16}
