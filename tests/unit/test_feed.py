"""The borders of the pipeline: what is staged, when, and that nothing is left, whatever happens.

Row i has the target 2**i, and a metric adds up the targets: what it grew by in a batch tells exactly which rows
the batch had. A lost, doubled or swapped row changes it. Sums of 2**i are exact in float32 below 2**24.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu
from mgpu import make_parallel
from mgpu.errors import StagingError

TOWERS = ["/CPU:0", "/CPU:1"]
BATCH = 2


class Seen(keras.metrics.Sum):
    """The sum of the targets."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true)


def make(depth, *, steps_per_execution=1):
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = make_parallel(plain, TOWERS, staging_depth=depth)
    model.compile(
        keras.optimizers.SGD(0.0),
        "mse",
        metrics=[mgpu.additive(Seen(name="seen"))],
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    return model


@pytest.fixture(scope="module")
def models():
    """Models by depth and steps_per_execution, made once: tracing takes most of a test's time."""
    made = {}

    def get(depth, steps_per_execution=1):
        key = (depth, steps_per_execution)
        if key not in made:
            made[key] = make(depth, steps_per_execution=steps_per_execution)
        return made[key]

    return get


def dataset(batches, *, first=0, fails_after=None):
    """Rows first, first + 1, ... in batches of 2."""
    rows = np.arange(first, first + BATCH * batches)
    x, y = np.float32(rows)[:, None], np.float32(2.0**rows)[:, None]
    if fails_after is None:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def failing():
        yield from zip(x[: BATCH * fails_after], y[: BATCH * fails_after], strict=True)
        raise OSError("the disk is gone")

    spec = (tf.TensorSpec((1,)), tf.TensorSpec((1,)))
    return tf.data.Dataset.from_generator(failing, output_signature=spec).batch(BATCH)


def rows_in(batch, *, first=0):
    return [first + BATCH * batch + i for i in range(BATCH)]


class Watch(keras.callbacks.Callback):
    """Records, after each batch, its rows and how many batches are staged."""

    def __init__(self, mode="train"):
        super().__init__()
        self.mode, self.rows, self.sizes, self.epochs, self._before = mode, [], [], [], 0.0

    def _look(self, logs):
        grown, self._before = int(logs["seen"] - self._before), logs["seen"]
        self.rows.append([i for i in range(24) if grown >> i & 1])
        self.sizes.append(self._sizes())

    def _sizes(self):
        sizes = self.model.staging_sizes()[self.mode]
        assert len(set(sizes)) == 1, "towers differ"
        return sizes[0]

    def on_train_batch_end(self, batch, logs=None):
        self._look(logs)

    def on_test_batch_end(self, batch, logs=None):
        if self.mode == "test":
            self._look(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._before = 0.0
        self.epochs.append(self._sizes())


def nothing_staged(model):
    return model.staging_sizes() == {"train": [0, 0], "test": [0, 0], "predict": [0, 0]}


@pytest.mark.parametrize("batches", [1, 2, 4, 9])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_every_batch_is_trained_on_once_in_order_while_the_area_fills_and_drains(models, depth, batches):
    model, watch = models(depth), Watch()
    model.fit(dataset(batches), shuffle=False, verbose=0, callbacks=[watch])
    assert watch.rows == [rows_in(batch) for batch in range(batches)]
    # Ahead of the step by `depth` batches, until the source has no more.
    assert watch.sizes == [min(depth, batches - 1 - batch) for batch in range(batches)]
    assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_each_epoch_fills_and_drains_anew(models, depth):
    model, watch = models(depth), Watch()
    model.fit(dataset(3), epochs=3, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.rows == [rows_in(batch) for batch in range(3)] * 3
    assert watch.epochs == [0, 0, 0]
    assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_an_endless_dataset_cut_into_epochs_loses_no_batch_between_them(models, depth):
    """What is staged at the end of an epoch is the start of the next."""
    model, watch = models(depth), Watch()
    model.fit(dataset(5).repeat(), epochs=3, steps_per_epoch=3, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.rows == [rows_in(batch % 5) for batch in range(9)]
    assert watch.epochs == [depth] * 3
    assert nothing_staged(model)


@pytest.mark.parametrize("batches", [1, 3, 5])
@pytest.mark.parametrize("steps_per_execution", [2])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_several_steps_in_a_call_use_every_batch_once(models, depth, steps_per_execution, batches):
    model, watch = models(depth, steps_per_execution), Watch()
    model.fit(dataset(batches), shuffle=False, verbose=0, callbacks=[watch])
    assert [i for rows in watch.rows for i in rows] == list(range(BATCH * batches))
    done = [min(steps_per_execution * (call + 1), batches) for call in range(-(-batches // steps_per_execution))]
    assert watch.sizes == [min(depth, batches - used) for used in done]
    assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_evaluate_sees_every_batch_once(models, depth):
    model, watch = models(depth), Watch("test")
    logs = model.evaluate(dataset(5), verbose=0, callbacks=[watch], return_dict=True)
    assert logs["seen"] == 2.0**10 - 1
    assert watch.rows == [rows_in(batch) for batch in range(5)]
    assert watch.sizes == [min(depth, 4 - batch) for batch in range(5)]
    assert nothing_staged(model)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("depth", [0, 1])
def test_predict_gives_every_row_once_in_order(models, depth, batches, steps_per_execution):
    model = models(depth, steps_per_execution)
    model.layers[0].set_weights([np.float32([[2.0]]), np.float32([1.0])])
    outputs = model.predict(dataset(batches), verbose=0)
    np.testing.assert_allclose(outputs[:, 0], 2.0 * np.arange(BATCH * batches) + 1)
    assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_other_data_in_the_next_call_is_not_mixed_with_the_last(models, depth):
    model = models(depth)
    for first, batches in ((0, 3), (8, 4), (4, 1)):
        watch = Watch()
        # Cut short: batches of this call are staged when it ends.
        model.fit(
            dataset(9 - first // 2, first=first), steps_per_epoch=batches, shuffle=False, verbose=0, callbacks=[watch]
        )
        assert watch.rows == [rows_in(batch, first=first) for batch in range(batches)]
        assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1])
def test_fit_evaluate_fit_see_their_own_data(models, depth):
    model = models(depth)
    first, second = Watch(), Watch()
    model.fit(dataset(3), shuffle=False, verbose=0, callbacks=[first], validation_data=dataset(2, first=10))
    assert model.evaluate(dataset(2, first=6), verbose=0, return_dict=True)["seen"] == 2**6 + 2**7 + 2**8 + 2**9
    model.fit(dataset(2, first=4), shuffle=False, verbose=0, callbacks=[second])
    assert first.rows == [[0, 1], [2, 3], [4, 5]]
    assert second.rows == [[4, 5], [6, 7]]
    assert nothing_staged(model)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_evaluate_and_predict_inside_a_callback_leave_the_training_data_alone(models, depth):
    model, predicted = models(depth), []

    class Inside(Watch):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            predicted.append(len(model.predict(dataset(3), verbose=0)))

        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            predicted.append(model.evaluate(dataset(1, first=9), verbose=0, return_dict=True)["seen"])

    watch = Inside()
    model.fit(dataset(4).repeat(), epochs=2, steps_per_epoch=2, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.rows == [rows_in(batch) for batch in range(4)]
    assert watch.epochs == [depth, depth]
    assert predicted == [6, 6, 2**9 + 2**10] * 2
    assert nothing_staged(model)


def nested_fit(model):
    class Nested(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                model.fit(dataset(2, first=10), shuffle=False, verbose=0)

    model.fit(dataset(4), shuffle=False, verbose=0, callbacks=[Nested()])


@pytest.mark.parametrize("depth", [1, 4])
def test_fit_inside_fit_is_refused(models, depth):
    model = models(depth)
    with pytest.raises(StagingError, match=r"holds batches of another dataset.*a callback called fit.*second make_par"):
        nested_fit(model)
    assert nothing_staged(model)


def test_fit_inside_fit_works_without_staging(models):
    nested_fit(models(0))


def test_the_remedy_for_fit_inside_fit_works(models):
    model = models(1)
    second = make_parallel(model, TOWERS)
    watch = Watch()

    class Nested(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            second.fit(dataset(2, first=10), shuffle=False, verbose=0)

    model.fit(dataset(3), shuffle=False, verbose=0, callbacks=[Nested(), watch])
    assert len(watch.sizes) == 3
    assert watch.sizes == [1, 1, 0]
    assert nothing_staged(model)
    assert nothing_staged(second)


# ---- however a call ends, nothing is left


class Raise(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def _raise_at_second(self, batch, logs=None):
        if batch == 1:
            raise self.error

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _raise_at_second


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt("mine")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("depth", [0, 4])
def test_nothing_is_left_when_a_callback_raises(models, depth, error, call):
    model = models(depth)
    with pytest.raises(type(error), match="mine"):
        getattr(model, call)(
            dataset(9), **({"shuffle": False} if call == "fit" else {}), verbose=0, callbacks=[Raise(error)]
        )
    assert nothing_staged(model)
    watch = Watch()
    model.fit(dataset(2, first=3), shuffle=False, verbose=0, callbacks=[watch])  # and the next call starts clean
    assert watch.rows == [[3, 4], [5, 6]]


@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_batches_before_a_failing_one_are_trained_on_and_nothing_is_left(models, depth, good):
    model, watch = models(depth), Watch()
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        model.fit(dataset(9, fails_after=good), shuffle=False, verbose=0, callbacks=[watch])
    assert watch.rows == [rows_in(batch) for batch in range(good)]
    assert nothing_staged(model)


# ---- where batches wait


@pytest.mark.parametrize("depth", [1, 4])
def test_staged_parts_wait_on_their_towers_device(models, depth):
    model, found = models(depth), []

    class Where(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                (lane,) = [lane for lane in model._mgpu.lanes("train").all() if lane.owner is not None]
                found.extend((area.peek_now(), area.device) for area in lane.areas)

    model.fit(dataset(6), shuffle=False, verbose=0, callbacks=[Where()])
    assert len(found) == len(TOWERS)
    for tower, ((x, y), device) in enumerate(found):
        assert device == TOWERS[tower]
        assert x.device.endswith(f"CPU:{tower}")
        assert y.device.endswith(f"CPU:{tower}")
        np.testing.assert_array_equal(x, [[2 + tower]])  # one row for each tower, of the second batch


def test_two_layouts_of_batches_share_a_model(models):
    """Without targets' last dimension the batches look different, and are staged in other areas."""
    model = models(1)
    watch = Watch()
    model.fit(dataset(2), shuffle=False, verbose=0, callbacks=[watch])
    other = tf.data.Dataset.from_tensor_slices((np.float64([[7]]), np.float32([[2.0**7]]))).batch(1)
    model.fit(other, shuffle=False, verbose=0, callbacks=[watch := Watch()])
    assert watch.rows == [[7]]
    assert nothing_staged(model)
