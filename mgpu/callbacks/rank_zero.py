"""Which callbacks run on which rank: those that write or print on rank 0, those that decide on all."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from mgpu.cluster.world import is_chief, world
from mgpu.errors import ModelError

# Their only effect is a file, a request or a line of output. OrbaxCheckpoint is not in every Keras 3.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)
# They change weights, the optimizer or the epoch, so that ranks would differ if one alone ran them.
_CHANGERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class RankZero(keras.callbacks.Callback):
    """Run a callback on rank 0 only.

    For callbacks of your own that write files, send messages or print. Those of Keras that do so are on rank 0
    only by themselves. On other ranks none of the callback's methods is called, `set_model` included.

    Args:
        callback: any callback that leaves the model, the optimizer and the data as they are.

    Attributes:
        callback: the one given.

    Raises:
        ModelError: `callback` is none, or has to run on every rank: it changes the weights, the learning rate or
            the epoch, or exchanges figures between ranks.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise ModelError(
                f"RankZero({callback!r}) was given a {name}, which is no keras.callbacks.Callback. Pass one callback, "
                "made already; for a function: RankZero(keras.callbacks.LambdaCallback(on_epoch_end=function))"
            )
        if _needs_all_ranks(callback):
            raise ModelError(
                f"RankZero({name}(...)) would run {name} on rank 0 only; it changes or exchanges what has to be equal "
                "on all ranks (weights, learning rate, epoch, figures), which would then differ or wait for each "
                f"other. Pass it as it is: callbacks=[{name}(...)]"
            )
        self.callback = callback

    @property
    def async_safe(self) -> bool:
        """Whether Keras may call it beside the next step: as the callback says, and always where it does nothing."""
        return not is_chief() or getattr(self.callback, "async_safe", False)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if is_chief():
            self.callback.set_model(model)

    def set_params(self, params: dict | None) -> None:
        super().set_params(params)
        if is_chief():
            self.callback.set_params(params)


def _forwarder(name: str) -> Callable[..., None]:
    def hook(self: RankZero, *args: Any, **kwargs: Any) -> None:
        if is_chief():
            getattr(self.callback, name)(*args, **kwargs)

    hook.__name__ = name
    return hook


# Every hook that the Keras at hand has, each to the one of the same name (Keras' own go on from there).
for _name in _HOOKS:
    setattr(RankZero, _name, _forwarder(_name))


class SharedBackup(keras.callbacks.Callback):
    """A `BackupAndRestore` for several ranks: rank 0 reads, writes and deletes; what it has read reaches all.

    The other ranks need not see the folder, and none can find it deleted before it has read it. Costs one broadcast
    of the weights and the optimizer's state where there was something to restore.

    Args:
        callback: what fit() was given.
    """

    def __init__(self, callback: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self.callback = callback

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params: dict | None) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def on_train_begin(self, logs: dict | None = None) -> None:
        group, model, values = world(), self.model, None
        if group.rank == 0:
            before = _iterations(model), model._initial_epoch
            self.callback.on_train_begin(logs)
            if (_iterations(model), model._initial_epoch) != before:
                values = [variable.numpy() for variable in _state(model)]
        what = "the state that BackupAndRestore restored"
        epoch, values = group.broadcast((model._initial_epoch, values), 0, what)
        if group.rank == 0 or values is None:
            return
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        for variable, value in zip(_state(model), values, strict=True):
            variable.assign(value)
        model._initial_epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if is_chief():
            self.callback.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if is_chief():
            self.callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        if is_chief():
            self.callback.on_train_end(logs)


def for_rank(callbacks: Sequence[Any], rank: int) -> list[keras.callbacks.Callback]:
    """Return what rank `rank` runs of the callbacks given to fit().

    Args:
        callbacks: as fit() takes them; nested lists are flattened.
        rank: of this process.

    Returns:
        On rank 0 all of them. On others, those of Keras that only write or print are left out, with their
        subclasses. With several ranks a `BackupAndRestore` is replaced by a `SharedBackup` on every rank.
    """
    kept = [callback for callback in keras.tree.flatten(callbacks) if rank == 0 or not isinstance(callback, _WRITERS)]
    if world().size == 1:
        return kept
    return [
        SharedBackup(callback) if isinstance(callback, keras.callbacks.BackupAndRestore) else callback
        for callback in kept
    ]


def _needs_all_ranks(callback: keras.callbacks.Callback) -> bool:
    restores = isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
    return isinstance(callback, _CHANGERS) or restores or getattr(callback, "needs_all_ranks", False)


def _iterations(model: keras.Model) -> int | None:
    # A LossScaleOptimizer counts in the optimizer that it wraps; early ones of Keras 3 do not say so.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return None if optimizer is None else int(optimizer.iterations)


def _state(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else [])]
