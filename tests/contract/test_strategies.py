"""The contract of a gradient strategy: one battery over all of them. A new one is tested by adding a row."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from mgpu.errors import StrategyError
from mgpu.strategies import GradientStrategy, ParameterServer, SingleDevice

DEVICES = [f"/CPU:{i}" for i in range(4)]


class Row(NamedTuple):
    make: Callable[[], GradientStrategy]
    towers: int
    homes: set  # the devices that may hold variables


STRATEGIES = {
    "single": Row(SingleDevice, 1, {"/CPU:0"}),
    "single-elsewhere": Row(lambda: SingleDevice("/CPU:3"), 1, {"/CPU:3"}),
    "ps-first-tower": Row(ParameterServer, 3, {"/CPU:0"}),
    "ps-one-tower": Row(ParameterServer, 1, {"/CPU:0"}),
    "ps-device": Row(lambda: ParameterServer("/CPU:3"), 3, {"/CPU:3"}),
    "ps-list": Row(lambda: ParameterServer(["/CPU:1", "/CPU:3"]), 3, {"/CPU:1", "/CPU:3"}),
    "ps-spread": Row(lambda: ParameterServer("spread"), 3, {"/CPU:0", "/CPU:1", "/CPU:2"}),
}
# V = 4 variables: shapes and how large they are.
SHAPES = [(3, 2), (2,), (), (4, 1)]
SIZES_BYTES = [24, 8, 4, 16]


@pytest.fixture(params=STRATEGIES)
def row(request):
    return STRATEGIES[request.param]


@pytest.fixture(params=[False, True], ids=["eager", "traced"])
def combine(request):
    """`combine` of a strategy, as it is or inside a tf.function."""
    if not request.param:
        return lambda strategy, *args: strategy.combine(*args)
    return lambda strategy, *args: tf.function(lambda: strategy.combine(*args), autograph=False)()


def homes_of(row):
    return row.make().assign_homes(SIZES_BYTES, DEVICES[: row.towers])


def draw(towers, dtype="float32"):
    """One array for each tower and variable; quarters, so that sums are exact in float16."""
    rng = np.random.default_rng(0)
    return [[rng.integers(-8, 8, size=shape).astype(dtype) / 4 for shape in SHAPES] for _ in range(towers)]


def on_towers(arrays):
    contributions = []
    for device, per_variable in zip(DEVICES, arrays, strict=False):
        with tf.device(device):
            contributions.append([tf.constant(array) for array in per_variable])
    return contributions


def short(tensor):
    spec = tf.DeviceSpec.from_string(tensor.device)
    return f"/{spec.device_type}:{spec.device_index}"


def test_it_is_a_strategy_with_a_name(row):
    strategy = row.make()
    assert isinstance(strategy, GradientStrategy)
    assert strategy.name in ("single", "parameter_server")


def test_every_variable_has_one_home(row):
    homes = homes_of(row)
    assert len(homes) == len(SIZES_BYTES)
    assert set(homes) == row.homes


@pytest.mark.parametrize("num_variables", [0, 1, 17])
def test_homes_cover_any_number_of_variables(row, num_variables):
    homes = row.make().assign_homes([8] * num_variables, DEVICES[: row.towers])
    assert len(homes) == num_variables
    assert set(homes) <= row.homes


def test_variables_without_bytes_have_a_home(row):
    assert set(row.make().assign_homes([0, 0, 0], DEVICES[: row.towers])) <= row.homes


def test_homes_are_the_same_each_time(row):
    assert homes_of(row) == homes_of(row)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_gradient_is_the_sum_over_towers(row, combine, dtype):
    arrays = draw(row.towers, dtype)
    combined = combine(row.make(), on_towers(arrays), homes_of(row))
    assert len(combined) == len(SHAPES)
    for gradient, *summands in zip(combined, *arrays, strict=True):
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, sum(summands))


def test_the_number_of_towers_appears_nowhere(row, combine):
    """Towers scale by the whole batch beforehand: a mean over towers would be wrong here."""
    ones = [[np.ones(shape, "float32") for shape in SHAPES]] * row.towers
    for gradient in combine(row.make(), on_towers(ones), homes_of(row)):
        np.testing.assert_array_equal(gradient, np.full(gradient.shape, row.towers, "float32"))


def test_sums_are_made_on_the_home_of_their_variable(row):
    if row.towers == 1:
        pytest.skip("one tower: nothing is summed")
    homes = homes_of(row)
    combined = row.make().combine(on_towers(draw(row.towers)), homes)
    assert [short(gradient) for gradient in combined] == homes


def test_traced_sums_are_placed_on_the_home_of_their_variable(row):
    if row.towers == 1:
        pytest.skip("one tower: nothing is summed")
    homes, seen = homes_of(row), []

    @tf.function(autograph=False)
    def step():
        combined = row.make().combine(on_towers(draw(row.towers)), homes)
        seen.extend(short(gradient) for gradient in combined)
        return combined

    step()
    assert seen == homes


def slices(tower, values=None):
    """Rows 1 and 1 + tower of a (4, 2) table; tower 0 has row 1 twice."""
    values = np.float32([[1, 2], [10, 20]]) * (tower + 1) if values is None else values
    with tf.device(DEVICES[tower]):
        return tf.IndexedSlices(tf.constant(values), tf.constant([1, 1 + tower]), tf.constant([4, 2]))


def dense_by_hand(towers):
    table = np.zeros((4, 2), "float32")
    for tower in range(towers):
        table[1] += np.float32([1, 2]) * (tower + 1)
        table[1 + tower] += np.float32([10, 20]) * (tower + 1)
    return table


def test_sparse_gradients_stay_sparse_and_duplicates_add_up(row, combine):
    home = row.make().assign_homes([32], DEVICES[: row.towers])
    (gradient,) = combine(row.make(), [[slices(tower)] for tower in range(row.towers)], home)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape == (2 * row.towers, 2)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), dense_by_hand(row.towers))


def test_sparse_and_dense_gradients_of_one_variable_add_up(row, combine):
    if row.towers == 1:
        pytest.skip("one tower: nothing is mixed")
    home = row.make().assign_homes([32], DEVICES[: row.towers])
    mixed = [[slices(tower)] for tower in range(row.towers)]
    mixed[1] = [tf.convert_to_tensor(mixed[1][0])]
    (gradient,) = combine(row.make(), mixed, home)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), dense_by_hand(row.towers))


def test_a_variable_without_gradient_on_any_tower_has_none(row, combine):
    arrays = draw(row.towers)
    contributions = [[per_variable[0], None, per_variable[2], None] for per_variable in on_towers(arrays)]
    combined = combine(row.make(), contributions, homes_of(row))
    assert [gradient is None for gradient in combined] == [False, True, False, True]
    np.testing.assert_array_equal(combined[2], sum(per_variable[2] for per_variable in arrays))


def test_no_variables_give_no_gradients(row):
    assert row.make().combine([[] for _ in range(row.towers)], []) == []


def test_a_nan_of_one_tower_is_not_hidden(row):
    arrays = draw(row.towers)
    arrays[-1][1][0] = np.nan
    combined = row.make().combine(on_towers(arrays), homes_of(row))
    assert np.isnan(combined[1].numpy()).tolist() == [True, False]


def test_a_gradient_missing_on_one_tower_is_refused(row):
    if row.towers == 1:
        pytest.skip("one tower: none to differ from")
    contributions = on_towers(draw(row.towers))
    contributions[1][2] = None
    with pytest.raises(StrategyError, match=r"Tower 1 has no gradient for a variable.*call it for every batch"):
        row.make().combine(contributions, homes_of(row))


def test_towers_with_different_numbers_of_gradients_are_refused(row):
    contributions = on_towers(draw(row.towers))
    contributions[-1].pop()
    counts = [4] * (row.towers - 1) + [3]
    with pytest.raises(StrategyError, match=r"different numbers of gradients.*build the model once") as raised:
        row.make().combine(contributions, homes_of(row))
    assert f"{counts} for 4 variables" in str(raised.value)


# ---- what single strategies promise beyond the contract


@pytest.mark.parametrize(
    ("sizes_bytes", "devices"),
    [
        pytest.param([7, 6, 5, 4, 3, 2, 1], 3, id="mixed"),
        pytest.param([5, 5, 4, 4, 3, 3, 3], 3, id="grahams-worst-case"),  # 11 against a best of 9
        pytest.param([100, 1, 1, 1], 2, id="one-giant"),
        pytest.param([4] * 10, 4, id="equal"),
        pytest.param([1, 1, 1, 1, 4], 2, id="largest-last"),  # in the model's order: 6 and 2
        pytest.param(list(np.random.default_rng(0).integers(1, 10_000, size=40)), 4, id="many"),
    ],
)
@pytest.mark.parametrize("how", ["spread", "list"])
def test_spread_variables_are_balanced_by_bytes(sizes_bytes, devices, how):
    names = DEVICES[:devices]
    strategy = ParameterServer("spread" if how == "spread" else names)
    homes = strategy.assign_homes(sizes_bytes, names)
    loads = [sum(size for size, home in zip(sizes_bytes, homes, strict=True) if home == name) for name in names]
    # No division is better than this, and largest-first is within 4/3 - 1/(3 D) of the best (Graham 1969).
    best = max(max(sizes_bytes), -(-sum(sizes_bytes) // devices))
    if sizes_bytes == [5, 5, 4, 4, 3, 3, 3]:
        best = 9
    assert 3 * devices * max(loads) <= best * (4 * devices - 1)


def test_balance_is_by_bytes_and_not_by_number():
    homes = ParameterServer("spread").assign_homes([100, 10, 10, 10, 10], DEVICES[:2])
    assert homes == ["/CPU:0", "/CPU:1", "/CPU:1", "/CPU:1", "/CPU:1"]


@pytest.mark.parametrize("device", [[], (), None], ids=repr)
def test_a_parameter_server_without_device_is_refused(device):
    with pytest.raises(StrategyError, match=r"ParameterServer\(device=.*names no device.*'/CPU:0', or 'spread'"):
        ParameterServer(device)
