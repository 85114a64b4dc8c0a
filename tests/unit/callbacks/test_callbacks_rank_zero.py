"""What runs on which rank."""

import inspect

import keras
import numpy as np
import pytest

from mgpu.callbacks import LearningRateSchedule, LearningRateWarmup, RankZero, Throughput, for_rank
from mgpu.errors import ModelError

HOOKS = sorted(name for name, _ in inspect.getmembers(keras.callbacks.Callback) if name.startswith("on_"))


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def set_model(self, model):
        super().set_model(model)
        self.calls.append(("set_model", model))

    def set_params(self, params):
        super().set_params(params)
        self.calls.append(("set_params", params))


for _name in HOOKS:
    setattr(Recorder, _name, lambda self, *args, _name=_name, **kwargs: self.calls.append((_name, args, kwargs)))


def small_model(optimizer="sgd"):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


DATA = np.arange(12, dtype="float32").reshape(6, 2) / 10, np.arange(6, dtype="float32").reshape(6, 1) / 10


@pytest.mark.parametrize("hook", HOOKS)
def test_rank_zero_forwards_each_hook_to_its_namesake(hook, ranks):
    """Catches a hook left out, and one that goes to another (on_batch_end for on_train_batch_end)."""
    wrapped = Recorder()
    numbered = "batch" in hook or "epoch" in hook
    args = (3,) if numbered else ()
    getattr(RankZero(wrapped), hook)(*args, logs={"loss": 1.0})
    assert wrapped.calls == [(hook, args, {"logs": {"loss": 1.0}})]


@pytest.mark.parametrize("hook", HOOKS)
def test_other_ranks_do_nothing(hook, ranks):
    ranks(1, 2)
    wrapped = Recorder()
    getattr(RankZero(wrapped), hook)(*((3,) if "batch" in hook or "epoch" in hook else ()))
    assert wrapped.calls == []


def test_rank_zero_sees_what_the_bare_callback_sees_in_fit_evaluate_and_predict(ranks):
    bare, wrapped = Recorder(), Recorder()
    model, (x, y) = small_model(), DATA
    callbacks = [bare, RankZero(wrapped)]
    model.fit(x, y, batch_size=2, epochs=2, validation_data=(x, y), verbose=0, callbacks=callbacks)
    model.evaluate(x, y, verbose=0, callbacks=callbacks)
    model.predict(x, verbose=0, callbacks=callbacks)

    def names(calls):
        return [call[0] for call in calls]

    assert names(wrapped.calls) == names(bare.calls)
    assert {"set_model", "set_params", "on_train_batch_end", "on_test_batch_begin", "on_predict_end"} <= set(
        names(wrapped.calls)
    )
    assert wrapped.model is model


def test_other_ranks_do_not_set_the_model(ranks):
    ranks(1, 2)
    wrapped = Recorder()
    small_model().fit(*DATA, verbose=0, callbacks=[RankZero(wrapped)])
    assert wrapped.calls == []


class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
    pass


WRITERS = {
    "checkpoint": lambda: keras.callbacks.ModelCheckpoint("a.keras"),
    "subclass": lambda: OwnCheckpoint("a.keras"),
    "csv": lambda: keras.callbacks.CSVLogger("log.csv"),
    "tensorboard": lambda: keras.callbacks.TensorBoard("logs"),
    "remote": lambda: keras.callbacks.RemoteMonitor(),
    "progress": lambda: keras.callbacks.ProgbarLogger(),
}
DECIDERS = {
    "early stopping": lambda: keras.callbacks.EarlyStopping(),
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau(),
    "nan": lambda: keras.callbacks.TerminateOnNaN(),
    "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    "lambda": lambda: keras.callbacks.LambdaCallback(),
    "ema": lambda: keras.callbacks.SwapEMAWeights(),
    "own": Recorder,
}


@pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
def test_what_writes_is_left_out_on_other_ranks(make, ranks):
    ranks(1, 2)
    callback = make()
    assert for_rank([callback], 1) == []
    assert for_rank([callback], 0) == [callback]


@pytest.mark.parametrize("make", DECIDERS.values(), ids=DECIDERS)
def test_what_decides_is_kept_on_all_ranks(make, ranks):
    ranks(1, 2)
    callback = make()
    assert for_rank([[callback]], 1) == [callback] == for_rank([callback], 0)


def test_one_process_keeps_its_list(ranks, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert for_rank([backup], 0) == [backup]


def _interrupted(folder, model, callbacks):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(*DATA, epochs=4, batch_size=2, verbose=0, callbacks=[*callbacks, Stop()])


def test_backup_is_restored_on_a_rank_that_does_not_see_the_folder(ranks, tmp_path):
    """Catches a restore from a folder on another host, and one from a folder already deleted."""
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    _interrupted(tmp_path, small_model(keras.optimizers.Adam(0.01)), [backup])

    resumed = small_model(keras.optimizers.Adam(0.01))
    chief = ranks(0, 2)
    (shared,) = for_rank([keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))], 0)
    shared.set_model(resumed)
    shared.on_train_begin()
    assert resumed._initial_epoch == 2

    other = small_model(keras.optimizers.Adam(0.01))
    ranks(1, 2, broadcasts=chief.broadcasts)
    (shared,) = for_rank([keras.callbacks.BackupAndRestore(str(tmp_path / "elsewhere"))], 1)
    shared.set_model(other)
    shared.on_train_begin()
    assert other._initial_epoch == 2
    assert int(other.optimizer.iterations) == 6
    for mine, theirs in zip(other.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    for mine, theirs in zip(other.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.parametrize(("rank", "exists"), [(0, True), (1, False)])
def test_backup_is_written_on_rank_zero_only(rank, exists, ranks, tmp_path):
    ranks(rank, 2, broadcasts=(None, None))
    folder = tmp_path / "backup"
    _interrupted(folder, small_model(), for_rank([keras.callbacks.BackupAndRestore(str(folder))], rank))
    assert folder.exists() is exists


@pytest.mark.parametrize(("rank", "exists"), [(0, False), (1, True)])
def test_backup_is_deleted_by_rank_zero_only(rank, exists, ranks, tmp_path):
    ranks(rank, 2, broadcasts=(None, None))
    folder = tmp_path / "backup"
    folder.mkdir()
    (callback,) = for_rank([keras.callbacks.BackupAndRestore(str(folder))], rank)
    small_model().fit(*DATA, verbose=0, callbacks=[callback])
    assert folder.exists() is exists


def test_without_a_backup_other_ranks_keep_their_state(ranks, tmp_path):
    chief = ranks(0, 2)
    model = small_model()
    (callback,) = for_rank([keras.callbacks.BackupAndRestore(str(tmp_path / "none"))], 0)
    callback.set_model(model)
    callback.on_train_begin()
    assert chief.broadcasts == (None, None)


ALL_RANKS = {
    "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore("backup"),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(),
    "SwapEMAWeights": lambda: keras.callbacks.SwapEMAWeights(),
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping(restore_best_weights=True),
    "LearningRateWarmup": LearningRateWarmup,
    "LearningRateSchedule": lambda: LearningRateSchedule({0: 0.1}),
    "Throughput": Throughput,
}


@pytest.mark.parametrize("name", ALL_RANKS)
def test_what_changes_the_ranks_state_is_refused(name, ranks):
    with pytest.raises(ModelError, match=rf"Pass it as it is: callbacks=\[{name}\(\.\.\.\)\]"):
        RankZero(ALL_RANKS[name]())


def test_no_callback_is_refused(ranks):
    with pytest.raises(ModelError, match=r"RankZero\(keras\.callbacks\.LambdaCallback\(on_epoch_end=function\)\)"):
        RankZero(lambda epoch, logs: None)
    RankZero(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None))
