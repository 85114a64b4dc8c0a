import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu.data.split import Layout, cut, join, layout_of, num_rows, part_bounds, rows_per_tower
from mgpu.errors import DataError

KINDS = ("dense", "dense-int64", "string", "ragged", "sparse", "scalar-per-row")


def batch_of(kind, rows):
    """Return a batch whose row r holds r, and what its rows are as nested Python values."""
    if kind == "dense":
        values = np.float32(np.arange(rows))[:, None] + np.float32([[0.0, 0.25]])
        return tf.constant(values, shape=(rows, 2)), values.reshape(rows, 2).tolist()
    if kind == "dense-int64":
        return tf.range(rows, dtype=tf.int64), list(range(rows))
    if kind == "string":
        names = [b"row %d" % row for row in range(rows)]
        return tf.constant(names, tf.string, shape=(rows,)), names
    if kind == "ragged":
        lists = [[float(row)] * (row % 3) for row in range(rows)]  # some rows are empty lists
        return tf.ragged.constant(lists, tf.float32, ragged_rank=1), lists
    if kind == "sparse":
        dense = np.zeros((rows, 3), np.float32)
        dense[np.arange(rows), np.arange(rows) % 3] = np.arange(rows)  # row 0 holds no value
        indices = np.argwhere(dense).reshape(-1, 2)
        return tf.SparseTensor(indices, dense[tuple(indices.T)], (rows, 3)), dense.tolist()
    return tf.reshape(tf.range(rows), (rows, 1)), [[row] for row in range(rows)]


def as_list(tensor):
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


@given(st.integers(0, 10_000), st.integers(1, 64))
@example(0, 1)
@example(0, 3)
@example(2, 3)
def test_bounds_cover_every_row_once_and_in_order(rows, towers):
    bounds = part_bounds(rows, towers)
    covered = [row for start, stop in bounds for row in range(start, stop)]
    assert covered == list(range(rows))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == towers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("rows", "towers", "sizes"),
    [
        pytest.param(8, 4, [2, 2, 2, 2], id="even"),
        pytest.param(7, 3, [2, 2, 3], id="uneven"),
        pytest.param(2, 3, [0, 1, 1], id="fewer-rows-than-towers"),
        pytest.param(0, 2, [0, 0], id="no-rows"),
        pytest.param(5, 1, [5], id="one-tower"),
    ],
)
def test_rows_per_tower_is_the_size_of_each_part(rows, towers, sizes):
    counts = rows_per_tower(tf.constant(rows, tf.int64), towers)
    assert [int(count) for count in counts] == sizes
    assert {count.dtype for count in counts} == {tf.int64}


def test_rows_per_tower_does_not_overflow_for_many_rows():
    # B * T must not pass through int32.
    rows = 2**31 - 1
    counts = rows_per_tower(tf.constant(rows, tf.int64), 8)
    assert sum(int(count) for count in counts) == rows


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 9), towers=st.integers(1, 4))
@example(rows=2, towers=3)
@example(rows=1, towers=4)
def test_parts_joined_again_are_the_batch(kind, rows, towers):
    batch, expected = batch_of(kind, rows)
    parts = cut([batch], towers)
    counts = rows_per_tower(num_rows([batch]), towers)
    joined = join([part[0] for part in parts], counts)
    assert type(joined) is type(batch)
    assert joined.dtype == batch.dtype
    assert as_list(joined) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_holds_its_rows(kind):
    batch, expected = batch_of(kind, 7)
    parts = cut([batch], 3)
    assert [as_list(part[0]) for part in parts] == [expected[0:2], expected[2:4], expected[4:7]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_part_holds_one_row_of_the_batch(kind):
    batch, expected = batch_of(kind, 2)  # of 4 towers: rows 0, 1, 0, 1
    parts = cut([batch], 4)
    held = [as_list(part[0]) for part in parts]
    counts = [int(count) for count in rows_per_tower(num_rows([batch]), 4)]
    assert counts == [0, 1, 0, 1]
    assert all(len(rows) == 1 and rows[0] in expected for rows in held)
    assert [held[1], held[3]] == [[expected[0]], [expected[1]]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_rows_is_cut_and_joined(kind):
    batch, _ = batch_of(kind, 0)
    parts = cut([batch], 3)
    assert [as_list(part[0]) for part in parts] == [[], [], []]
    joined = join([part[0] for part in parts], rows_per_tower(num_rows([batch]), 3))
    assert as_list(joined) == []


def test_join_keeps_only_the_counted_rows():
    # Without its counts, the stand-in row of an empty tower would come out as a row of the batch.
    parts = [tf.constant([[9.0]]), tf.constant([[1.0], [2.0]])]
    joined = join(parts, [tf.constant(0, tf.int64), tf.constant(2, tf.int64)])
    np.testing.assert_array_equal(joined, [[1.0], [2.0]])


def test_sparse_outputs_of_different_widths_join():
    parts = [tf.SparseTensor([[0, 1]], [1.0], (1, 2)), tf.SparseTensor([[0, 3]], [2.0], (1, 4))]
    joined = join(parts, [tf.constant(1, tf.int64)] * 2)
    np.testing.assert_array_equal(tf.sparse.to_dense(joined), [[0, 1, 0, 0], [0, 0, 0, 2]])


def test_all_tensors_of_a_batch_are_cut_at_the_same_rows():
    tensors = [batch_of(kind, 5)[0] for kind in KINDS]
    for part, (start, stop) in zip(cut(tensors, 2), ((0, 2), (2, 5)), strict=True):
        for kind, tensor in zip(KINDS, part, strict=True):
            assert as_list(tensor) == batch_of(kind, 5)[1][start:stop], kind


def test_scalars_go_to_every_tower_whole():
    parts = cut([tf.constant(0.5), tf.range(4)], 2)
    assert [float(part[0]) for part in parts] == [0.5, 0.5]
    assert [as_list(part[1]) for part in parts] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_one_traced_cut_serves_batches_of_every_size(kind):
    traces = []
    layout = layout_of(batch_of(kind, 3)[0])

    @tf.function(input_signature=[layout.specs])
    def there_and_back(tensors):
        traces.append(1)
        parts = cut(tensors, 3)
        return join([part[0] for part in parts], rows_per_tower(num_rows(tensors), 3))

    for rows in (1, 2, 3, 7):
        batch, expected = batch_of(kind, rows)
        assert as_list(there_and_back([batch])) == expected
    assert len(traces) == 1


NESTS = {
    "one-tensor": lambda t: t,
    "tuple": lambda t: (t, t),
    "tuple-with-none": lambda t: (t, None, t),
    "dict": lambda t: {"b": t, "a": t},
    "nested": lambda t: ({"x": t, "deep": [t, (t, None)]}, t, None),
}


@pytest.mark.parametrize("nest", NESTS)
def test_flattened_batches_are_packed_in_the_same_nesting(nest):
    batch = NESTS[nest](tf.constant([[1.0], [2.0]]))
    layout = layout_of(batch)
    flat = layout.flatten(batch)
    assert len(flat) == len(layout.specs)
    assert None not in flat
    numbered = layout.pack([float(i) for i in range(len(flat))])
    # The same nest with every leaf replaced by its place in the flat order, Nones kept.
    places = iter(range(len(flat)))
    leaves = [None if leaf is None else float(next(places)) for leaf in tf.nest.flatten(batch)]
    assert numbered == tf.nest.pack_sequence_as(batch, leaves)


def test_composite_tensors_count_as_one():
    batch = ({"r": batch_of("ragged", 2)[0], "s": batch_of("sparse", 2)[0]}, tf.zeros(2))
    layout = layout_of(batch)
    packed = layout.pack(layout.flatten(batch))
    assert packed[0]["r"] is batch[0]["r"]
    assert packed[0]["s"] is batch[0]["s"]
    assert packed[1] is batch[1]


def test_an_empty_optional_of_keras_stands_for_none():
    spec = (tf.TensorSpec((4, 2)), tf.OptionalSpec(None))
    layout = layout_of(spec)
    assert layout.specs == [tf.TensorSpec((None, 2))]
    assert layout.pack(["x"]) == ("x", None)


@pytest.mark.parametrize(
    ("spec", "relaxed"),
    [
        pytest.param(tf.TensorSpec((4, 2)), tf.TensorSpec((None, 2)), id="dense"),
        pytest.param(tf.TensorSpec((None, 2)), tf.TensorSpec((None, 2)), id="open"),
        pytest.param(tf.TensorSpec(()), tf.TensorSpec(()), id="scalar"),
        pytest.param(tf.TensorSpec(None), tf.TensorSpec(None), id="unknown-rank"),
        pytest.param(tf.SparseTensorSpec((4, 3)), tf.SparseTensorSpec((None, 3)), id="sparse"),
        pytest.param(
            tf.RaggedTensorSpec((4, None, 2), tf.int32, 1, tf.int32),
            tf.RaggedTensorSpec((None, None, 2), tf.int32, 1, tf.int32),
            id="ragged",
        ),
    ],
)
def test_layout_leaves_the_number_of_rows_open(spec, relaxed):
    assert layout_of((spec,)).specs == [relaxed]


def test_layouts_are_equal_for_batches_of_different_sizes():
    keys = [layout_of(({"a": tf.zeros((rows, 2))}, None, tf.zeros(rows))).key for rows in (1, 2, 7)]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 1  # hashable, and so a key of a dict


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((tf.zeros((2, 3)), tf.zeros(2)), id="width"),
        pytest.param((tf.zeros((2, 2), tf.float64), tf.zeros(2)), id="dtype"),
        pytest.param((tf.zeros((2, 2)), None, tf.zeros(2)), id="none-in-between"),
        pytest.param({"x": tf.zeros((2, 2)), "y": tf.zeros(2)}, id="nesting"),
        pytest.param((tf.zeros((2, 2)), tf.zeros((2, 1))), id="rank"),
    ],
)
def test_layouts_of_other_batches_differ(other):
    assert layout_of(other).key != layout_of((tf.zeros((2, 2)), tf.zeros(2))).key


def test_layout_of_an_iterators_spec_is_that_of_its_batches():
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((6, 2), "float32"), np.zeros(6, "int32")))
    layout = layout_of(dataset.batch(2, drop_remainder=True).element_spec)
    assert layout.key == layout_of((tf.zeros((5, 2)), tf.zeros(5, tf.int32))).key


@pytest.mark.parametrize(
    ("specs", "row_bytes"),
    [
        pytest.param([tf.TensorSpec((None, 3, 2))], 24, id="float32"),
        pytest.param([tf.TensorSpec((None, 3), tf.uint8), tf.TensorSpec((None,), tf.int64)], 3 + 8, id="sum"),
        pytest.param([tf.TensorSpec(())], 0, id="scalar-has-no-rows"),
        pytest.param([tf.TensorSpec((None, None))], None, id="open-dimension"),
        pytest.param([tf.TensorSpec((None,), tf.string)], None, id="string"),
        pytest.param([tf.SparseTensorSpec((None, 3))], None, id="sparse"),
        pytest.param([tf.RaggedTensorSpec((None, None))], None, id="ragged"),
    ],
)
def test_row_bytes_counts_one_row_where_that_is_fixed(specs, row_bytes):
    assert Layout(True, specs).row_bytes == row_bytes


@pytest.mark.parametrize("batch", [None, (None, None), {}], ids=repr)
def test_a_batch_without_tensors_is_refused(batch):
    with pytest.raises(DataError, match=r"it holds no tensor: .*Yield \(inputs, targets\)"):
        layout_of(batch)
