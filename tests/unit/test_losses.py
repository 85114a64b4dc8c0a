import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu.errors import ModelError
from mgpu.losses import flat_losses, is_marked_rowwise, is_rowwise, loss_terms, rowwise, total_loss

# float32 sums of a few dozen terms near 1, in another order than NumPy's float64.
CLOSE = {"rtol": 2e-6, "atol": 1e-6}

MEANS = ["sum_over_batch_size", "mean", "mean_with_sample_weight"]


def _known(reductions):
    """Leave out the reductions that this version of Keras does not have."""
    known = []
    for reduction in reductions:
        try:
            keras.losses.MeanSquaredError(reduction=reduction)
        except ValueError:
            continue
        known.append(reduction)
    return known


REDUCTIONS = _known([*MEANS, "sum"])


def compiled(loss, y, y_pred, **kwargs):
    """Return the built losses of a model compiled with `loss`."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss=loss, **kwargs)
    model._compile_loss.build(y, y_pred)
    return model._compile_loss


def terms_of(loss, y, y_pred, sample_weight=None):
    return loss_terms(compiled(loss, y, y_pred), y, y_pred, sample_weight)


def masked(values, mask):
    tensor = tf.constant(values)
    if mask is not None:
        tensor._keras_mask = tf.constant(mask)
    return tensor


def draw(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("float32"), rng.normal(size=shape).astype("float32")


MASK = np.array([[True, True, False], [True, False, False], [True, True, True], [False, False, False]])


@pytest.mark.parametrize("mask", [None, MASK], ids=["no-mask", "mask"])
@pytest.mark.parametrize("weights", ["none", "steps", "rows"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_numerator_and_denominator_are_the_sums_of_keras_mean(reduction, weights, mask):
    """Squared errors of 4 rows of 3 steps, (4, 3) values, by hand in NumPy."""
    y, y_pred = draw(4, 3, 2)
    values = np.square(y - y_pred, dtype="float64").mean(-1)  # (4, 3)
    weight = {
        "none": None,
        "steps": np.float32([[1, 0, 2], [0.5, 1, 1], [0, 0, 3], [1, 1, 1]]),
        "rows": np.float32([[2], [0], [1], [0.5]]),
    }[weights]
    keep = np.ones((4, 3)) if mask is None else mask.astype("float64")
    numerator = (values * keep * (1 if weight is None else weight)).sum()
    if reduction == "sum":
        denominator, kind = 1.0, "sum"
    elif reduction == "mean_with_sample_weight" and weight is not None:
        # Weights (4, 1) beside values (4, 3): Keras sums the weights as they come, unless a mask spreads them.
        denominator, kind = (weight.sum() if mask is None else (keep * weight).sum()), "data"
    elif mask is not None:
        denominator, kind = keep.sum(), "data"
    else:
        denominator, kind = 12.0, "rows"

    (term,) = terms_of(keras.losses.MeanSquaredError(reduction=reduction), y, masked(y_pred, mask), weight)

    assert term.kind == kind
    np.testing.assert_allclose(term.numerator, numerator, **CLOSE)
    np.testing.assert_allclose(term.denominator, denominator, **CLOSE)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", [None, np.float32([0, 2, 0.5, 0, 1, 1, 4])], ids=["unweighted", "weighted"])
def test_terms_of_uneven_parts_add_up_to_the_loss_of_the_batch(reduction, weights):
    y, y_pred = draw(7, 3)
    loss = keras.losses.MeanAbsoluteError(reduction=reduction)
    values = np.abs(y - y_pred).mean(-1) * (1 if weights is None else weights)
    divisor = {"sum": 1, "mean_with_sample_weight": 7 if weights is None else weights.sum()}.get(reduction, 7)

    losses = compiled(loss, y, y_pred)
    parts = [slice(0, 2), slice(2, 7)]
    terms = [loss_terms(losses, y[p], y_pred[p], None if weights is None else weights[p])[0] for p in parts]

    numerator = sum(float(t.numerator) for t in terms)
    denominator = 1 if terms[0].kind == "sum" else sum(float(t.denominator) for t in terms)
    np.testing.assert_allclose(numerator / denominator, values.sum() / divisor, **CLOSE)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_classes_leave_numerator_and_denominator(reduction):
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.ones(4), size=(3, 2)).astype("float32")
    labels = np.array([[0, 9], [9, 9], [3, 1]])
    valid = labels != 9
    picked = np.take_along_axis(probabilities, np.where(valid, labels, 0)[..., None], -1)[..., 0]
    expected = -np.log(picked, dtype="float64")[valid].sum()

    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=9, reduction=reduction)
    (term,) = terms_of(loss, labels, tf.constant(probabilities))

    np.testing.assert_allclose(term.numerator, expected, **CLOSE)
    np.testing.assert_allclose(term.denominator, 1 if reduction == "sum" else 3, **CLOSE)
    assert term.kind == ("sum" if reduction == "sum" else "data")


def test_a_mask_and_ignored_classes_both_count():
    labels = np.array([[0, 9], [1, 1]])
    y_pred = masked(np.full((2, 2, 2), 0.5, "float32"), np.array([[True, True], [True, False]]))
    (term,) = terms_of(keras.losses.SparseCategoricalCrossentropy(ignore_class=9), labels, y_pred)
    # Left are (0, 0) and (1, 0), each -log 0.5.
    np.testing.assert_allclose(term.numerator, 2 * np.log(2), **CLOSE)
    np.testing.assert_allclose(term.denominator, 2, **CLOSE)


def test_a_fully_masked_part_adds_nothing():
    y, y_pred = draw(2, 3, 1)
    (term,) = terms_of("mse", y, masked(y_pred, np.zeros((2, 3), bool)))
    assert (float(term.numerator), float(term.denominator)) == (0.0, 0.0)


def test_a_loss_that_reduces_itself_is_weighed_by_its_rows():
    y, y_pred = draw(5, 2)
    (term,) = terms_of(lambda y, p: keras.ops.max(keras.ops.abs(y - p)), y, tf.constant(y_pred))
    np.testing.assert_allclose(term.numerator, 5 * np.abs(y - y_pred).max(), **CLOSE)
    assert (float(term.denominator), term.kind) == (5.0, "rows")


def test_terms_come_in_keras_order_and_skip_outputs_without_loss():
    y, y_pred = draw(4, 1)
    ys, preds = [y, y, y], [tf.constant(y_pred)] * 3
    losses = compiled(["mse", None, "mae"], ys, preds)
    terms = loss_terms(losses, ys, preds, None)
    np.testing.assert_allclose(
        [float(t.numerator) for t in terms], [np.square(y - y_pred).sum(), np.abs(y - y_pred).sum()], **CLOSE
    )
    assert [loss.fn.__name__ for loss in flat_losses(losses)] == ["mean_squared_error", "mean_absolute_error"]


def test_reading_terms_leaves_the_compiled_losses_as_they_were():
    y, y_pred = draw(4, 1)
    losses = compiled("mse", y, y_pred)
    (loss,) = flat_losses(losses)
    before = (loss.reduction, losses.metrics[:] if losses.metrics else losses.metrics)
    loss_terms(losses, y, y_pred, None)
    assert flat_losses(losses)[0] is loss
    assert (loss.reduction, losses.metrics) == before
    np.testing.assert_allclose(losses(y, y_pred), np.square(y - y_pred).mean(), **CLOSE)


def test_no_compiled_loss_has_no_terms():
    assert loss_terms(None, 0, 0, None) == []
    assert flat_losses(None) == []
    assert total_loss(None, [], 0, 0, record=True) is None


@pytest.mark.parametrize(
    ("loss_weights", "expected"),
    [
        pytest.param(None, 2.0 + 5.0, id="unweighted"),
        pytest.param([0.5, 10.0], 0.5 * 2 + 10 * 5, id="weighted"),
        pytest.param([1.0, 0.0], 2.0, id="one-off"),
    ],
)
def test_total_loss_weighs_and_sums_as_keras_does(loss_weights, expected):
    ys, preds = [tf.zeros((3, 1))] * 2, [tf.ones((3, 1))] * 2
    losses = compiled(["mse", "mae"], ys, preds, loss_weights=loss_weights)
    total = total_loss(losses, [tf.constant(2.0), tf.constant(5.0)], ys, preds, record=False)
    np.testing.assert_allclose(total, expected, **CLOSE)


@pytest.mark.parametrize("record", [True, False])
def test_total_loss_updates_the_trackers_only_when_asked(record):
    ys, preds = [tf.zeros((3, 1))] * 2, [tf.ones((3, 1))] * 2
    losses = compiled(["mse", "mae"], ys, preds)
    total_loss(losses, [tf.constant(2.0), tf.constant(5.0)], ys, preds, record=record)
    assert [float(m.result()) for m in losses.metrics] == ([2.0, 5.0] if record else [0.0, 0.0])


# ---- which losses can be cut

# Every loss of keras.losses, and whether a batch's loss is the sum of its rows' losses over a count.
ROWWISE = {
    "BinaryCrossentropy": True,
    "BinaryFocalCrossentropy": True,
    "CTC": True,
    "CategoricalCrossentropy": True,
    "CategoricalFocalCrossentropy": True,
    "CategoricalGeneralizedCrossEntropy": True,
    "CategoricalHinge": True,
    "Circle": False,  # compares each row with all others
    "CosineSimilarity": True,
    "Dice": False,  # one ratio over the batch
    "Hinge": True,
    "Huber": True,
    "KLDivergence": True,
    "LogCosh": True,
    "MeanAbsoluteError": True,
    "MeanAbsolutePercentageError": True,
    "MeanSquaredError": True,
    "MeanSquaredLogarithmicError": True,
    "Poisson": True,
    "SparseCategoricalCrossentropy": True,
    "SquaredHinge": True,
    "Tversky": False,  # one ratio over the batch
}
CLASSES = sorted(
    name
    for name, symbol in vars(keras.losses).items()
    if isinstance(symbol, type) and issubclass(symbol, keras.losses.Loss) and symbol is not keras.losses.Loss
)


def test_the_table_holds_every_loss_of_keras():
    assert set(CLASSES) <= set(ROWWISE)  # a loss that is new in Keras must be looked at


@pytest.mark.parametrize("name", CLASSES)
def test_keras_losses_are_cut_where_they_look_at_single_rows(name):
    assert is_rowwise(getattr(keras.losses, name)()) is ROWWISE[name]


@pytest.mark.parametrize("name", [name for name in CLASSES if ROWWISE[name]])
def test_losses_that_are_cut_give_each_row_the_same_value_in_any_part(name):
    """The claim behind the table, tried out: the values of the parts are those of the whole."""
    rng = np.random.default_rng(0)
    y_pred = rng.dirichlet(np.ones(4), size=5).astype("float32")
    labels = rng.integers(0, 4, size=5)
    y = np.eye(4, dtype="float32")[labels]
    if name in ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy"):
        y = labels
    if name == "CTC":
        y, y_pred = rng.integers(1, 3, size=(5, 2)), rng.normal(size=(5, 6, 4)).astype("float32")
    loss = getattr(keras.losses, name)(reduction=None)
    whole = np.asarray(loss(y, y_pred))
    assert whole.shape == (5,)
    np.testing.assert_allclose(np.concatenate([loss(y[:2], y_pred[:2]), loss(y[2:], y_pred[2:])]), whole, **CLOSE)


@pytest.mark.parametrize("name", [name for name in ("Dice", "Tversky") if name in CLASSES])
@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        pytest.param((1, 2), True, id="within-rows"),
        pytest.param([1], True, id="list"),
        pytest.param((0, 1), False, id="over-rows"),
        pytest.param(None, False, id="everything"),
    ],
)
def test_pooling_losses_are_cut_where_their_axis_leaves_the_rows_out(name, axis, expected):
    try:
        loss = getattr(keras.losses, name)(axis=axis)
    except TypeError:
        pytest.skip("this version of Keras has no axis for it")
    assert is_rowwise(loss) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mse", True), ("categorical_crossentropy", True), ("dice", False), ("tversky", False), ("circle", False)],
)
def test_losses_given_by_name_are_known_too(name, expected):
    y, y_pred = np.eye(3, dtype="float32"), np.full((3, 3), 0.3, "float32")
    try:
        (loss,) = flat_losses(compiled(name, y, y_pred))
    except ValueError:
        pytest.skip("this version of Keras does not have it")
    assert is_rowwise(loss) is expected


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_without_reduction_is_left_to_keras(reduction):
    assert not is_rowwise(keras.losses.MeanSquaredError(reduction=reduction))


class Contrast(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.square(y_pred - keras.ops.mean(y_pred, axis=0))


class Squared(keras.losses.MeanSquaredError):
    """A subclass may override anything."""


def custom_function(y_true, y_pred):
    return keras.ops.square(y_true - y_pred)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda: Contrast(), id="class"),
        pytest.param(lambda: Squared(), id="subclass-of-keras-loss"),
        pytest.param(lambda: flat_losses(compiled(custom_function, np.zeros((2, 1)), np.zeros((2, 1))))[0], id="fn"),
        pytest.param(lambda: flat_losses(compiled(lambda y, p: p, np.zeros(2), np.zeros(2)))[0], id="lambda"),
    ],
)
def test_custom_losses_are_not_cut(loss):
    assert not is_rowwise(loss())


def test_marked_losses_are_cut():
    def marked(y_true, y_pred):
        return keras.ops.square(y_true - y_pred)

    assert rowwise(marked) is marked
    assert is_marked_rowwise(marked)
    y = np.zeros((2, 1), "float32")
    assert is_rowwise(flat_losses(compiled(marked, y, y))[0])
    assert is_rowwise(rowwise(Contrast()))
    assert not is_marked_rowwise(Contrast())  # one object is marked, not its class
    assert not is_marked_rowwise(custom_function)


def test_marking_a_loss_changes_nothing_else():
    loss = keras.losses.MeanSquaredError()
    config = loss.get_config()
    assert rowwise(loss).get_config() == config


def test_a_name_cannot_be_marked():
    with pytest.raises(ModelError, match=r"rowwise\('mse'\).*got a str.*pass loss='mse' to compile\(\) as it is"):
        rowwise("mse")


def test_a_value_that_is_no_loss_cannot_be_marked():
    with pytest.raises(ModelError, match=r"rowwise\(0\.5\) needs a loss function.*got a float"):
        rowwise(0.5)


def test_a_callable_without_attributes_cannot_be_marked():
    with pytest.raises(ModelError, match=r"cannot mark a builtin_function_or_method.*Wrap it in a function: mgpu\.row"):
        rowwise(max)
