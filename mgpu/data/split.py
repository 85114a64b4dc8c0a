"""Which rows of a batch each tower gets, and how any Keras batch is flattened, cut and joined.

B = rows in the batch, T = towers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mgpu.errors import DataError


def part_bounds(rows: int, towers: int) -> list[tuple[int, int]]:
    """Return the rows `[start, stop)` that each tower gets of a batch.

    Tower t gets the rows `[B*t//T, B*(t+1)//T)`: sizes differ by at most one, every row is used
    once, and the order is kept. With fewer rows than towers some parts are empty.

    Args:
        rows: B, the rows of the batch, 0 or more. A Python int; `cut` does the same with tensors.
        towers: T, 1 or more.

    Returns:
        T pairs of row numbers.

    Example:
        >>> part_bounds(7, 3)
        [(0, 2), (2, 4), (4, 7)]
    """
    return [(rows * t // towers, rows * (t + 1) // towers) for t in range(towers)]


def rows_per_tower(rows: tf.Tensor, towers: int) -> list[tf.Tensor]:
    """Return the size of each part of a batch of `rows` (a scalar int64), as T scalar int64."""
    return [stop - start for start, stop in part_bounds(rows, towers)]


class Layout(NamedTuple):
    """The shape of a batch with the number of rows left open: its nesting, and a TypeSpec for each tensor.

    `structure` has True where a tensor stands and None where Keras passes None. Hashable parts are
    compared by `key`, so that batches of different sizes share one traced program.
    """

    structure: Any
    specs: list[tf.TypeSpec]

    @property
    def key(self) -> tuple:
        return (repr(self.structure), *self.specs)

    @property
    def row_bytes(self) -> int | None:
        """The bytes of one row, or None where a tensor has open dimensions, strings, or no fixed number of values."""
        sizes = []
        for spec in self.specs:
            inner = spec.shape[1:].num_elements() if spec.shape.rank else 0
            if not isinstance(spec, tf.TensorSpec) or inner is None or spec.dtype == tf.string:
                return None
            sizes.append(inner * spec.dtype.size)
        return sum(sizes)

    def flatten(self, batch: Any) -> list[Any]:
        """Return the tensors of `batch` (composite tensors whole), without the Nones."""
        return [leaf for leaf in tf.nest.flatten(batch) if not _is_none(leaf)]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Return `tensors` in the nesting of the batch, with its Nones."""
        rest = iter(tensors)
        leaves = [next(rest) if here else None for here in tf.nest.flatten(self.structure)]
        return tf.nest.pack_sequence_as(self.structure, leaves)


def layout_of(batch: Any) -> Layout:
    """Return the layout of a batch, or of the `element_spec` of an iterator.

    The first dimension is relaxed to None: an epoch iterator can carry the batch size as a static
    dimension, and a part does not have that size.

    Raises:
        DataError: the batch holds no tensor.
    """
    leaves = tf.nest.flatten(batch)
    specs = [_relaxed(_spec_of(leaf)) for leaf in leaves if not _is_none(leaf)]
    if not specs:
        raise DataError(
            f"A batch was asked for its layout; it holds no tensor: {batch!r}. The source probably "
            "yields None. Yield (inputs, targets) or (inputs, targets, sample_weights)."
        )
    return Layout(tf.nest.pack_sequence_as(batch, [None if _is_none(v) else True for v in leaves]), specs)


def num_rows(tensors: Sequence[Any]) -> tf.Tensor:
    """Return the rows of a batch, a scalar int64 that lives on the host."""
    first = next(v for v in tensors if _rank(v) != 0)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    return tf.shape(first, out_type=tf.int64)[0]


def cut(tensors: Sequence[Any], towers: int) -> list[list[Any]]:
    """Cut a flat batch into one part per tower.

    An empty part gets the batch's nearest row in its place: every layer can then run (reshapes and
    cuDNN kernels reject zero rows), and what comes of it is dropped by its row count of 0, which
    `rows_per_tower` tells.

    Args:
        tensors: dense, ragged or sparse tensors of shape (B, ...); scalars go to every tower.
        towers: T.

    Returns:
        `parts[t][i]`, of shape (rows of tower t, ...) and the type of `tensors[i]`.
    """
    if towers == 1:
        return [list(tensors)]
    rows = num_rows(tensors)
    tensors = _of_equal_rows(tensors, rows)
    parts = []
    for start, stop in part_bounds(rows, towers):
        empty = tf.cast(tf.equal(start, stop), tf.int64)
        first = tf.maximum(tf.minimum(start, rows - empty), 0)
        count = tf.minimum(stop - start + empty, rows)
        parts.append([_take(v, first, count) for v in tensors])
    return parts


def _of_equal_rows(tensors: Sequence[Any], rows: tf.Tensor) -> list[Any]:
    checks = [
        tf.debugging.assert_equal(
            num_rows([v]),
            rows,
            message="The tensors of a batch have different numbers of rows, and towers get the same rows of each. "
            "The source probably slices inputs, targets and weights differently; yield the same rows of all.",
        )
        for v in tensors
        if _rank(v) != 0
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [v if _rank(v) == 0 else tf.nest.map_structure(tf.identity, v, expand_composites=True) for v in tensors]


def join(parts: Sequence[Any], rows: Sequence[tf.Tensor]) -> Any:
    """Join the towers' parts of one tensor again, leaving out those of empty towers.

    Args:
        parts: T tensors of one type, `parts[t]` of shape (rows of tower t or more, ...).
        rows: T scalar int64, how many rows of each part count.
    """
    kept = [_take(part, tf.zeros((), tf.int64), count) for part, count in zip(parts, rows, strict=True)]
    if isinstance(kept[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=kept, expand_nonconcat_dims=True)
    return tf.concat(kept, axis=0)


def _take(tensor: Any, first: tf.Tensor, count: tf.Tensor) -> Any:
    if _rank(tensor) == 0:
        return tensor
    if isinstance(tensor, tf.SparseTensor):
        rest = tensor.dense_shape[1:]
        start = tf.concat([[first], tf.zeros_like(rest)], axis=0)
        part = tf.sparse.slice(tensor, start, tf.concat([[count], rest], axis=0))
        return tf.SparseTensor(part.indices, part.values, tf.ensure_shape(part.dense_shape, [tensor.shape.rank]))
    return tensor[first : first + count]


def _is_none(leaf: Any) -> bool:
    # Keras' PyDataset and generator adapters send None through tf.data as an empty Optional.
    return leaf is None or isinstance(leaf, (tf.experimental.Optional, tf.OptionalSpec))


def _rank(tensor: Any) -> int | None:
    return tensor.shape.rank


def _spec_of(leaf: Any) -> tf.TypeSpec:
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)


def _relaxed(spec: tf.TypeSpec) -> tf.TypeSpec:
    shape = spec.shape
    if shape.rank is None or shape.rank == 0:
        return spec if not isinstance(spec, tf.TensorSpec) else tf.TensorSpec(shape, spec.dtype)
    shape = tf.TensorShape([None]).concatenate(shape[1:])
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)
