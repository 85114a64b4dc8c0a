"""What the strategies over ranks share: which gradients travel together, in which order, and in what form.

V = trainable variables. A *bucket* is a list of gradients that travel as one flat tensor.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mgpu.cluster.world import World
from mgpu.cluster.world import world as whole_world
from mgpu.errors import StrategyError
from mgpu.strategies.base import GradientStrategy
from mgpu.strategies.parameter_server import ParameterServer

COMPRESSIONS = {"float16": tf.float16, "bfloat16": tf.bfloat16}
DEFAULT_BUCKET_BYTES = 8 << 20


class AllreduceStrategy(GradientStrategy):
    """Every rank holds the weights; gradients are summed over ranks and applied by each.

    Local towers are summed first, so one gradient for each variable leaves the process. Gradients are packed
    into buckets in the order in which the backward pass yields them, last layer first, and the exchange of a
    bucket runs while the backward pass goes on.

    Args:
        ps_device: where this rank's copy of the weights lives, as for `ParameterServer`.
        bucket_bytes: a bucket is sent when it holds as much. With K buckets only about the last one is waited
            for, and each costs the latency of a message: lower it on slow links with large models.
        compression: None, "float16" or "bfloat16": the type in which gradients travel. Halves the bytes; the sums
            then differ from one device's by the rounding of that type. Losses, counts, statistics and metrics
            are never compressed.
        error_feedback: keep what compression rounded away, and add it to the next step's gradient. Costs one
            copy of the gradients. Source: Seide et al. 2014, "1-bit stochastic gradient descent", section 3.
        sparse_as_dense: whether sparse gradients (of embeddings) travel as dense ones. None takes in each step
            what moves fewer bytes: gathered slices, or the dense table.
        process_set: the ranks that train together, a list of numbers; None for all of the job.

    Raises:
        StrategyError: an argument has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        ps_device: str | Sequence[str] = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        compression: str | None = None,
        error_feedback: bool = False,
        sparse_as_dense: bool | None = None,
        process_set: Sequence[int] | None = None,
    ) -> None:
        kind = type(self).__name__
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise StrategyError(
                f"{kind}(bucket_bytes={bucket_bytes!r}) is not a number of bytes of 1 or more. "
                f"Leave it out for {DEFAULT_BUCKET_BYTES}, or pass a larger one for fewer messages."
            )
        if compression is not None and compression not in COMPRESSIONS:
            raise StrategyError(
                f"{kind}(compression={compression!r}) is not a type that gradients can travel in. "
                f"Pass one of {', '.join(map(repr, COMPRESSIONS))}, or None."
            )
        if error_feedback and compression is None:
            raise StrategyError(
                f"{kind}(error_feedback=True) keeps what compression rounds away; compression is None, so there is "
                "nothing to keep. Pass compression='bfloat16' too, or leave error_feedback out."
            )
        self._local = ParameterServer(ps_device)
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._error_feedback = error_feedback
        self._sparse_as_dense = sparse_as_dense
        self._process_set = None if process_set is None else sorted(process_set)
        self._world: World | None = None
        self._residuals: dict[str, tf.Variable] = {}
        self.num_buckets = 0

    # ---- what a child says: how one tensor is exchanged

    @abc.abstractmethod
    def _start(self, flat: tf.Tensor, name: str) -> Callable[[], tf.Tensor]:
        """Begin to sum a flat tensor over ranks; the function that is returned waits for the sum."""

    @abc.abstractmethod
    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Return the tensors (rows, ...) of all ranks one after the other; rows differ by rank."""

    def _check_world(self, world: World) -> None:
        """Raise if the transport does not reach the ranks of `world`."""

    # ---- the contract

    @property
    def world(self) -> World:
        if self._world is None:
            whole = whole_world()
            world = whole if self._process_set is None else whole.group(self._process_set)
            self._check_world(world)
            self._world = world
        return self._world

    def assign_homes(self, sizes_bytes: Sequence[int], towers: Sequence[str]) -> list[str]:
        return self._local.assign_homes(sizes_bytes, towers)

    def describe(self) -> str:
        options = [f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"] if self.num_buckets else []
        options += [f"compressed to {self._compression}"] if self._compression else []
        return f"{self.name}{': ' + ', '.join(options) if options else ''}"

    def exchange(
        self, gradients: Sequence[Any], riders: Sequence[tf.Tensor], share: tf.Tensor
    ) -> tuple[list[Any], list[tf.Tensor]]:
        if self.world.size == 1:
            return list(gradients), list(riders)
        out: list[Any] = list(gradients)
        dense, sparse = [], []
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices) and self._sparse_as_dense is not True:
                sparse.append(index)
            elif gradient is not None:
                out[index] = tf.convert_to_tensor(gradient)
                dense.append(index)
        buckets = self._buckets([out[i] for i in dense])
        self.num_buckets = len(buckets)
        # The riders go with the last bucket, if they can travel in its form.
        aboard = self._compression is None and bool(buckets) and out[dense[buckets[-1][0]]].dtype == tf.float32
        riding = [i for i, rider in enumerate(riders) if aboard and rider.dtype == tf.float32]
        pending: list[tuple[list[int], list[int], Callable[[], list[tf.Tensor]]]] = []
        for number, bucket in enumerate(buckets):
            indices = [dense[i] for i in bucket]
            last = number == len(buckets) - 1
            tensors = [out[i] for i in indices] + [riders[i] for i in riding if last]
            name = f"gradients_{number + 1}_of_{len(buckets)}"
            pending.append((indices, riding if last else [], self._start_packed(tensors, name, compress=True)))
        rest = [i for i in range(len(riders)) if i not in set(riding)]
        for dtype in sorted({riders[i].dtype.name for i in rest}):
            group = [i for i in rest if riders[i].dtype.name == dtype]
            pending.append(([], group, self._start_packed([riders[i] for i in group], f"state_{dtype}")))
        out_riders = list(riders)
        for indices, passengers, finish in pending:
            sums = iter(finish())
            for i in indices:
                out[i] = next(sums)
            for i in passengers:
                out_riders[i] = next(sums)
        for index in sparse:
            out[index] = self._exchange_sparse(out[index], f"sparse_{index}")
        return out, out_riders

    def sum_over_ranks(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        if self.world.size == 1:
            return list(tensors)
        out = list(tensors)
        for dtype in sorted({t.dtype.name for t in out}):
            group = [i for i, t in enumerate(tensors) if t.dtype.name == dtype]
            sums = self._start_packed([out[i] for i in group], f"{name}_{dtype}")()
            for i, total in zip(group, sums, strict=True):
                out[i] = total
        return out

    def gather_over_ranks(self, tensor: Any, name: str) -> Any:
        return tensor if self.world.size == 1 else self._gather(tensor, name)

    # ---- buckets

    def _buckets(self, gradients: Sequence[tf.Tensor]) -> list[list[int]]:
        """Return the numbers of the gradients that travel together, in the order in which they are ready."""
        open_buckets: dict[tf.DType, list[int]] = {}
        filled: dict[tf.DType, int] = {}
        buckets: list[list[int]] = []
        for index in reversed(range(len(gradients))):
            dtype = gradients[index].dtype
            open_buckets.setdefault(dtype, []).append(index)
            filled[dtype] = filled.get(dtype, 0) + (gradients[index].shape.num_elements() or 0) * dtype.size
            if filled[dtype] >= self._bucket_bytes:
                buckets.append(open_buckets.pop(dtype))
                filled[dtype] = 0
        return buckets + list(open_buckets.values())

    def _start_packed(
        self, tensors: Sequence[tf.Tensor], name: str, compress: bool = False
    ) -> Callable[[], list[tf.Tensor]]:
        wire = tensors[0].dtype
        boolean = wire == tf.bool
        parts = [tf.reshape(tf.cast(t, tf.int32) if boolean else t, [-1]) for t in tensors]
        flat = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
        if compress and self._compression is not None and wire.is_floating and wire.size > 2:
            flat = self._compressed(flat, name)
        finish = self._start(flat, name)

        def unpack() -> list[tf.Tensor]:
            total = tf.cast(finish(), wire)
            sizes = [tf.size(p) if p.shape.num_elements() is None else p.shape.num_elements() for p in parts]
            pieces = tf.split(total, tf.stack(sizes) if any(tf.is_tensor(s) for s in sizes) else sizes, num=len(sizes))
            return [
                tf.ensure_shape(tf.reshape(piece, tf.shape(t)), t.shape)
                for piece, t in zip(pieces, tensors, strict=True)
            ]

        return unpack

    def _compressed(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        wire = COMPRESSIONS[self._compression or ""]
        if not self._error_feedback:
            return tf.cast(flat, wire)
        if name not in self._residuals:
            with tf.init_scope():
                self._residuals[name] = tf.Variable(
                    tf.zeros(flat.shape, flat.dtype), trainable=False, name=f"{name}_residual"
                )
        residual = self._residuals[name]
        wanted = flat + residual
        sent = tf.cast(wanted, wire)
        # What overflowed is not fed back: an infinite gradient makes loss scaling skip the step, once.
        lost = wanted - tf.cast(sent, flat.dtype)
        residual.assign(tf.where(tf.math.is_finite(lost), lost, tf.zeros_like(lost)))
        return sent

    # ---- sparse gradients

    def _exchange_sparse(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        def gathered() -> tuple[tf.Tensor, tf.Tensor]:
            return self._gather(slices.values, f"{name}_values"), self._gather(slices.indices, f"{name}_indices")

        if self._sparse_as_dense is False:
            values, indices = gathered()
            return tf.IndexedSlices(values, indices, slices.dense_shape)
        table = slices.dense_shape[0]

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            (total,) = self._start_packed([tf.convert_to_tensor(slices)], f"{name}_dense", compress=False)()
            return total, tf.range(tf.cast(table, slices.indices.dtype))

        # A rank receives the other ranks' slices, or about two tables (a ring allreduce): the same choice on all.
        (count,) = self.sum_over_ranks([tf.size(slices.indices, out_type=tf.int64)], f"{name}_count")
        values, indices = self._branch(count < 2 * tf.cast(table, tf.int64), gathered, dense)
        values = tf.ensure_shape(values, tf.TensorShape([None]).concatenate(slices.values.shape[1:]))
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _branch(self, predicate: tf.Tensor, yes: Callable, no: Callable) -> Any:
        return tf.cond(predicate, yes, no)
