import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu.merge import is_seed, merge_state, starting_value

NAN = float("nan")


def variable(value, *, dtype="float32", name="moving_mean", **aggregation):
    return keras.Variable(np.asarray(value, dtype), dtype=dtype, name=name, trainable=False, **aggregation)


def merge(kind, old, new, rows):
    dtype = kind.dtype
    return merge_state(
        kind,
        tf.cast(old, dtype),
        [tf.cast(value, dtype) for value in new],
        [tf.constant(count, tf.int64) for count in rows],
    )


@pytest.fixture(params=[False, True], ids=["eager", "traced"])
def merged(request):
    """`merge`, run as it is or inside a tf.function."""
    if not request.param:
        return merge
    return lambda kind, *args: tf.function(lambda: merge(kind, *args), autograph=False)()


@pytest.mark.parametrize(
    ("new", "rows", "expected"),
    [
        pytest.param([[1, 2], [3, 6]], [2, 2], [2, 4], id="even"),
        # A mean over towers gives 2 and 4.
        pytest.param([[1, 2], [3, 6]], [3, 1], [1.5, 3], id="uneven"),
        # NaN * 0 is NaN: what an empty tower says must not be multiplied, but dropped.
        pytest.param([[NAN, NAN], [3, 6]], [0, 4], [3, 6], id="empty-tower-first"),
        pytest.param([[1, 2], [NAN, np.inf]], [4, 0], [1, 2], id="empty-tower-last"),
        pytest.param([[1, 2], [NAN, 0], [4, 8]], [1, 0, 2], [3, 6], id="empty-tower-between"),
    ],
)
def test_floats_take_the_mean_weighted_by_rows(merged, new, rows, expected):
    np.testing.assert_allclose(merged(variable([0, 0]), [9, 9], new, rows), expected, rtol=1e-6)


def test_a_moving_average_is_that_of_the_whole_batch():
    """The rule's reason: 7 rows on towers of 4 and 3, momentum 0.9, by hand in NumPy."""
    rows = np.random.default_rng(0).normal(size=7)
    old = 0.5
    new = [0.9 * old + 0.1 * part.mean() for part in (rows[:4], rows[4:])]
    expected = 0.9 * old + 0.1 * rows.mean()
    np.testing.assert_allclose(merge(variable(0), old, new, [4, 3]), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_mean_keeps_the_dtype(merged, dtype):
    value = merged(variable([0], dtype=dtype), [0], [[1], [2]], [1, 1])
    assert value.dtype == dtype
    assert float(value[0]) == 1.5


def test_a_nan_of_a_tower_with_rows_is_not_hidden():
    assert np.isnan(merge(variable(0), 0, [NAN, 1], [1, 1]))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sums_add_up_each_towers_change(merged, dtype):
    # From 10: +2 and +5 and, on a tower without rows, +100 that does not count.
    value = merged(variable([0], aggregation="sum", dtype=dtype), [10], [[12], [15], [110]], [1, 2, 0])
    np.testing.assert_array_equal(value, [17])


def test_a_sum_drops_the_nan_of_an_empty_tower():
    np.testing.assert_array_equal(merge(variable(0, aggregation="sum"), 10, [NAN, 15], [0, 2]), 15)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([1, 1, 1], 5.0), ([0, 1, 1], 6.0), ([0, 0, 1], 7.0), ([1, 0, 0], 5.0)],
    ids=str,
)
def test_the_first_tower_with_rows_is_taken_when_asked_for(merged, rows, expected):
    value = merged(variable(0, aggregation="only_first_replica"), 1, [5, 6, 7], rows)
    assert float(value) == expected


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_integers_that_agree_are_kept(merged, dtype):
    value = merged(variable([0, 1], dtype=dtype), [0, 0], [[0, 1], [0, 1]], [2, 1])
    np.testing.assert_array_equal(value, np.array([0, 1], dtype))


def test_an_empty_tower_has_no_say_in_integers(merged):
    np.testing.assert_array_equal(merged(variable(0, dtype="int32"), 0, [9, 4, 4], [0, 1, 2]), 4)
    np.testing.assert_array_equal(merged(variable(0, dtype="int32"), 0, [4, 4, 9], [1, 2, 0]), 4)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_that_differ_are_refused(merged, dtype):
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        merged(variable(0, dtype=dtype, name="num_rows"), 0, [0, 1], [3, 2])
    message = str(raised.value).replace("\\", "")  # TensorFlow quotes it when it is raised by a graph
    assert f"The variable 'num_rows' ({dtype}) got different values on different towers" in message
    assert 'add_weight(..., aggregation="sum") if its changes add up, or "only_first_replica"' in message


def test_seeds_advance_once():
    seed = keras.random.SeedGenerator(7).state
    assert is_seed(seed)
    value = merge(seed, [7, 0], [[7, 1], [1_000_010, 1]], [0, 2])
    np.testing.assert_array_equal(value, [7, 1])


def test_only_the_state_of_a_seed_generator_is_a_seed():
    assert not is_seed(variable([0, 0], dtype="uint32", name="counter"))
    assert not is_seed(variable([0, 0, 0], dtype="uint32", name="seed_generator_state"))


def test_towers_start_from_different_seeds_and_the_first_from_the_plain_models():
    seed = keras.random.SeedGenerator(7).state
    old = tf.constant([7, 3], seed.dtype)
    starts = [tuple(starting_value(seed, old, tower).numpy().tolist()) for tower in range(8)]
    assert starts[0] == (7, 3)
    assert len(set(starts)) == 8
    draws = {float(tf.random.stateless_uniform((), start)) for start in starts}
    assert len(draws) == 8


def test_other_state_starts_from_its_old_value_on_every_tower():
    old = tf.constant([1.0, 2.0])
    for tower in range(3):
        assert starting_value(variable([0, 0]), old, tower) is old
