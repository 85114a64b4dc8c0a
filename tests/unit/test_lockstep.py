import threading

import numpy as np
import pytest
import tensorflow as tf

from mgpu.errors import ModelError
from mgpu.lockstep import run_in_lockstep

TOWERS = ["/CPU:0", "/CPU:1", "/CPU:2"]
VALUES = np.float32([[1, 2], [10, 20], [100, 200]])


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mgpu-tower")]


def reduce(value, how="SUM"):
    return tf.distribute.get_replica_context().all_reduce(how, value)


def run(call, rows=(1, 1, 1), values=VALUES):
    """Run `call(t, value of tower t)` for each tower inside a tf.function."""

    @tf.function(autograph=False)
    def step(tensor):
        counts = [tf.constant(count, tf.int64) for count in rows]
        return run_in_lockstep(TOWERS, lambda t: call(t, tensor[t]), counts)

    return step(tf.constant(values))


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    assert ours() == []


def test_every_tower_gets_the_sum_over_towers():
    for total in run(lambda t, value: reduce(value)):
        np.testing.assert_allclose(total, [111, 222])


def test_sums_made_one_after_the_other_use_what_came_before():
    def call(t, value):
        total = reduce(value)  # 111, 222
        return total, reduce(value * total)

    for first, second in run(call):
        np.testing.assert_allclose(first, VALUES.sum(0))
        np.testing.assert_allclose(second, VALUES.sum(0) ** 2)


def test_nests_are_summed_leaf_by_leaf():
    for total in run(lambda t, value: reduce({"a": value, "b": [value * 2, value * 3]})):
        np.testing.assert_allclose(total["a"], [111, 222])
        np.testing.assert_allclose(total["b"][1], [333, 666])


def test_a_mean_divides_by_the_towers():
    for mean in run(lambda t, value: reduce(value, "MEAN")):
        np.testing.assert_allclose(mean, [37, 74])


def test_what_a_tower_without_rows_says_is_dropped():
    values = VALUES.copy()
    values[1] = np.nan
    for total in run(lambda t, value: reduce(value), rows=(2, 0, 1), values=values):
        np.testing.assert_allclose(total, [101, 202])


def test_results_come_in_the_order_of_towers_and_from_their_devices():
    where = []

    def call(t, value):
        where.append((t, tf.identity(value).device[-5:]))
        return value + t

    results = run(call)
    np.testing.assert_allclose(results, VALUES + np.float32([[0], [1], [2]]))
    assert sorted(where) == [(0, "CPU:0"), (1, "CPU:1"), (2, "CPU:2")]


def test_gradients_flow_through_the_sums():
    """d/dx_t of sum_s (sum_u x_u)^2 / 2 is T times the sum, for every tower."""

    @tf.function(autograph=False)
    def gradient(tensor):
        counts = [tf.ones((), tf.int64)] * 3
        squares = run_in_lockstep(TOWERS, lambda t: reduce(tensor[t]) ** 2 / 2, counts)
        return tf.gradients(tf.add_n([tf.reduce_sum(s) for s in squares]), tensor)[0]

    np.testing.assert_allclose(gradient(tf.constant(VALUES)), np.tile(3 * VALUES.sum(0), (3, 1)))


def test_only_one_tower_runs_at_a_time():
    running, most = [], []

    def call(t, value):
        for _ in range(3):
            running.append(t)
            most.append(len(running))
            tf.add(value, 1.0)
            running.remove(t)
            value = reduce(value)
        return value

    run(call)
    assert max(most) == 1


def test_towers_without_sums_run_too():
    np.testing.assert_allclose(run(lambda t, value: value * 2), VALUES * 2)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_error_of_one_tower_is_raised(bad, when):
    def call(t, value):
        if t == bad and when == "before":
            raise KeyError("mine")
        value = reduce(value)
        if t == bad:
            raise KeyError("mine")
        return reduce(value)

    with pytest.raises(KeyError, match="mine"):
        run(call)
    assert ours() == []


def test_the_first_towers_error_is_raised_when_several_fail():
    def call(t, value):
        raise ValueError(f"tower {t}")

    with pytest.raises(ValueError, match="tower 0"):
        run(call)


def test_an_interrupt_in_a_tower_reaches_the_caller():
    def call(t, value):
        if t == 1:
            raise KeyboardInterrupt
        return reduce(value)

    with pytest.raises(KeyboardInterrupt):
        run(call)


@pytest.mark.parametrize("eager_tower", [0, 1, 2])
def test_towers_that_ask_for_different_numbers_of_sums_are_refused(eager_tower):
    def call(t, value):
        value = reduce(value)
        return reduce(value) if t == eager_tower else value

    with pytest.raises(ModelError, match=rf"Tower {eager_tower} asked for a sum over 3 towers; .*call it for every"):
        run(call)


def test_the_graph_can_be_used_after_an_error():
    def bad(t, value):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        run(bad)
    for total in run(lambda t, value: reduce(value)):
        np.testing.assert_allclose(total, [111, 222])
