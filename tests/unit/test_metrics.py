import keras
import numpy as np
import pytest

from mgpu.errors import ModelError
from mgpu.metrics import additive, is_additive

# float32 sums of eleven terms in two orders.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ROWS = 11
CUTS = [4, 1, ROWS - 1]


def data(kind):
    """Return y_true and y_pred of 11 rows, of the kind that a metric expects."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, size=ROWS)
    probabilities = rng.dirichlet(np.ones(3), size=ROWS).astype("float32")
    if kind == "values":
        return tuple(rng.uniform(0.1, 2.0, size=(2, ROWS, 3)).astype("float32"))
    if kind == "binary":
        return (labels[:, None] > 0).astype("float32"), probabilities[:, :1]
    if kind == "classes":
        return np.eye(3, dtype="float32")[labels], probabilities
    if kind == "labels":
        return labels, probabilities
    return labels, rng.integers(0, 3, size=ROWS)  # "label-pairs"


# Every metric of keras.metrics: its arguments, and the data that it is fed.
METRICS = {
    "AUC": ({"num_thresholds": 7}, "binary"),
    "Accuracy": ({}, "label-pairs"),
    "BinaryAccuracy": ({}, "binary"),
    "BinaryCrossentropy": ({}, "binary"),
    "BinaryIoU": ({}, "binary"),
    "CategoricalAccuracy": ({}, "classes"),
    "CategoricalCrossentropy": ({}, "classes"),
    "CategoricalHinge": ({}, "classes"),
    "ConcordanceCorrelation": ({}, "values"),
    "CosineSimilarity": ({}, "values"),
    "F1Score": ({}, "classes"),
    "FBetaScore": ({"average": "micro", "threshold": 0.4}, "classes"),
    "FalseNegatives": ({}, "binary"),
    "FalsePositives": ({"thresholds": [0.2, 0.5]}, "binary"),
    "Hinge": ({}, "values"),
    "IoU": ({"num_classes": 3, "target_class_ids": [0, 2]}, "label-pairs"),
    "KLDivergence": ({}, "classes"),
    "LogCoshError": ({}, "values"),
    "Mean": ({}, "values"),
    "MeanAbsoluteError": ({}, "values"),
    "MeanAbsolutePercentageError": ({}, "values"),
    "MeanIoU": ({"num_classes": 3}, "label-pairs"),
    "MeanMetricWrapper": ({"fn": keras.losses.mean_squared_error}, "values"),
    "MeanSquaredError": ({}, "values"),
    "MeanSquaredLogarithmicError": ({}, "values"),
    "OneHotIoU": ({"num_classes": 3, "target_class_ids": [0, 2]}, "classes"),
    "OneHotMeanIoU": ({"num_classes": 3}, "classes"),
    "PearsonCorrelation": ({}, "values"),
    "Poisson": ({}, "values"),
    "Precision": ({}, "binary"),
    "PrecisionAtRecall": ({"recall": 0.5, "num_thresholds": 5}, "binary"),
    "R2Score": ({}, "values"),
    "Recall": ({"thresholds": [0.1, 0.6]}, "binary"),
    "RecallAtPrecision": ({"precision": 0.5, "num_thresholds": 5}, "binary"),
    "RootMeanSquaredError": ({}, "values"),
    "SensitivityAtSpecificity": ({"specificity": 0.5, "num_thresholds": 5}, "binary"),
    "SparseCategoricalAccuracy": ({}, "labels"),
    "SparseCategoricalCrossentropy": ({}, "labels"),
    "SparseTopKCategoricalAccuracy": ({"k": 2}, "labels"),
    "SpecificityAtSensitivity": ({"sensitivity": 0.5, "num_thresholds": 5}, "binary"),
    "SquaredHinge": ({}, "values"),
    "Sum": ({}, "values"),
    "TopKCategoricalAccuracy": ({"k": 2}, "classes"),
    "TrueNegatives": ({}, "binary"),
    "TruePositives": ({}, "binary"),
}
CLASSES = sorted(
    name
    for name, symbol in vars(keras.metrics).items()
    if isinstance(symbol, type) and issubclass(symbol, keras.metrics.Metric) and symbol is not keras.metrics.Metric
)


def make(name):
    arguments, kind = METRICS[name]
    return getattr(keras.metrics, name)(**arguments), data(kind)


def state_after(metric, *updates):
    for y, y_pred, weight in updates:
        if type(metric) in (keras.metrics.Mean, keras.metrics.Sum):
            metric.update_state(y_pred, weight)
        else:
            metric.update_state(y, y_pred, weight)
    return [np.asarray(v) for v in metric.variables]


def test_the_table_holds_every_metric_of_keras():
    assert set(CLASSES) <= set(METRICS)  # a metric that is new in Keras must be looked at


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("name", CLASSES)
def test_state_of_all_rows_is_the_sum_of_the_parts_states(name, weighted):
    """What is_additive says of Keras' own metrics, tried out for each."""
    assert is_additive(make(name)[0])
    weights = None
    if weighted:
        weights = np.random.default_rng(1).choice([0.0, 0.5, 2.0], size=ROWS).astype("float32")
        if "IoU" in name:  # counts in integers, and warns of weights that are none
            weights = np.int32(2 * weights)
    for cut in CUTS:
        metric, (y, y_pred) = make(name)
        whole = state_after(metric, (y, y_pred, weights))
        assert any(np.any(value != 0) for value in whole)
        parts = []
        for rows in (slice(0, cut), slice(cut, ROWS)):
            metric, _ = make(name)
            parts.append(state_after(metric, (y[rows], y_pred[rows], None if weights is None else weights[rows])))
        for value, *summands in zip(whole, *parts, strict=True):
            np.testing.assert_allclose(sum(summands), value, **CLOSE)


@pytest.mark.parametrize("name", CLASSES)
def test_an_update_adds_to_the_state_that_was(name):
    """Towers start from zero and their changes are added to the old state: an update must not scale it."""
    metric, (y, y_pred) = make(name)
    first = state_after(metric, (y[:4], y_pred[:4], None))
    both = state_after(metric, (y[4:], y_pred[4:], None))
    metric, _ = make(name)
    second = state_after(metric, (y[4:], y_pred[4:], None))
    for a, b, total in zip(first, second, both, strict=True):
        np.testing.assert_allclose(a + b, total, **CLOSE)


@pytest.mark.parametrize("name", CLASSES)
def test_state_starts_at_zero(name):
    metric, (y, y_pred) = make(name)
    state_after(metric, (y, y_pred, None))
    metric.reset_state()
    assert all(np.all(np.asarray(v) == 0) for v in metric.variables)


@pytest.mark.parametrize("function", ["mean_squared_error", "binary_crossentropy", "categorical_accuracy"])
def test_functions_of_keras_with_one_value_per_row_are_added_up(function):
    assert is_additive(keras.metrics.MeanMetricWrapper(getattr(keras.metrics, function)))


def mean_over_batch(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class Largest(keras.metrics.Metric):
    pass


class MyMean(keras.metrics.Mean):
    pass


@pytest.mark.parametrize(
    "make_metric",
    [
        pytest.param(Largest, id="class"),
        pytest.param(MyMean, id="subclass-of-keras-metric"),
        pytest.param(lambda: keras.metrics.MeanMetricWrapper(mean_over_batch), id="function"),
    ],
)
def test_custom_metrics_are_not_added_up(make_metric):
    assert not is_additive(make_metric())


POOLED = {
    "dice": lambda: keras.losses.dice,
    "tversky": lambda: keras.losses.tversky,
    "circle": lambda: keras.losses.circle,
    "a-loss-object": lambda: keras.losses.MeanSquaredError(),
}


@pytest.mark.parametrize("name", [n for n in POOLED if n == "a-loss-object" or hasattr(keras.losses, n)])
def test_functions_of_keras_with_one_value_per_batch_are_not_added_up(name):
    """compile(metrics=[keras.losses.dice]) counts one value for each update: with towers, one for each tower."""
    assert not is_additive(keras.metrics.MeanMetricWrapper(POOLED[name](), name=name))


def test_marked_metrics_are_added_up():
    metric = Largest()
    assert additive(metric) is metric
    assert is_additive(metric)
    assert not is_additive(Largest())  # one object is marked, not its class


def test_marked_functions_are_added_up():
    def per_row(y_true, y_pred):
        return keras.ops.abs(y_true - y_pred)[:, 0]

    assert additive(per_row) is per_row
    assert is_additive(keras.metrics.MeanMetricWrapper(per_row))


def test_a_name_cannot_be_marked():
    with pytest.raises(ModelError, match=r"additive\('mse'\).*got a str.*pass metrics=\['mse'\] as it is"):
        additive("mse")


def test_a_value_that_is_no_metric_cannot_be_marked():
    with pytest.raises(ModelError, match=r"additive\(7\) needs a metric object or a metric function; it got a int"):
        additive(7)


def test_a_callable_without_attributes_cannot_be_marked():
    with pytest.raises(ModelError, match="Wrap it in a function"):
        additive(max)
