"""What the learning rate is in each batch when the batch is large: warm-up, linear scaling, momentum correction.

The rules are those of Goyal et al. 2017, arXiv:1706.02677. The rate is a function of epoch and batch alone, so that a
run that resumes goes on as if it had not stopped, and all ranks have the same.
"""

import abc
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu.cluster.world import is_chief, world
from mgpu.errors import ModelError

# Optimizer -> (the learning rate it was compiled with, the one that was set last): a second fit() of the same
# optimizer must not take a rate that is scaled already for one that is to be scaled.
_BASES: "weakref.WeakKeyDictionary[Any, tuple[float, float]]" = weakref.WeakKeyDictionary()


class _PerBatch(keras.callbacks.Callback, abc.ABC):
    """Set the optimizer's learning rate before each batch, and correct the momentum for the change.

    Attributes:
        needs_all_ranks: for RankZero, which refuses such a callback.
    """

    needs_all_ranks = True

    def __init__(
        self, scale: float | str | None, steps_per_epoch: int | None, momentum_correction: bool, shown: str
    ) -> None:
        super().__init__()
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not (scale is None or scale == "size" or (number and scale >= 1)):  # type: ignore[operator]
            raise ModelError(
                f"{shown}(scale={scale!r}): the learning rate is multiplied by nothing (None), by the number of "
                f"devices ('size') or by a number of 1 or more; {scale!r} is none of these. For the paper's linear "
                f"scaling: {shown}(..., scale='size')"
            )
        self._scale = scale
        self._steps_per_epoch = steps_per_epoch
        self._momentum_correction = momentum_correction
        self._shown = shown
        self._epoch = 0
        self._steps = 0
        self._begun = False

    # ---- Keras' hooks

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._devices = world().size * len(getattr(model, "towers", ("",)))
        self._found = None
        optimizer: Any = getattr(model, "optimizer", None)
        if _settable(getattr(optimizer, "learning_rate", None)):
            # Before BackupAndRestore puts back the rate of the step that it was interrupted in.
            self._found = (float(optimizer.learning_rate), _steps_made(optimizer))

    def on_train_begin(self, logs: dict | None = None) -> None:
        rate = self.model.optimizer.learning_rate
        if not _settable(rate):
            inner = _innermost(self.model.optimizer)
            schedule = type(getattr(inner, "_learning_rate", rate)).__name__
            raise ModelError(
                f"{self._shown} sets optimizer.learning_rate before each batch; the optimizer {type(inner).__name__} "
                f"computes its own (learning_rate={schedule}), and nothing can be set. Compile with a number, and "
                "pass the schedule to the callback: "
                f"model.compile({type(inner).__name__}(learning_rate=0.1), ...), "
                f"callbacks=[mgpu.callbacks.LearningRateSchedule({schedule}(...))]"
            )
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch
        if not self._begun:
            self._begun = True
            self._begin(epoch)
        steps = self._steps_per_epoch or (self.params or {}).get("steps")
        if not steps and self._ramps(epoch):
            raise ModelError(
                f"{self._shown} changes the learning rate within epoch {epoch}; how many batches the epoch has is not "
                "known before it ends (steps=None), as with a generator or an endless dataset. Say it: "
                f"{self._shown}(..., steps_per_epoch=100)"
            )
        self._steps = steps or 1

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        rate = self._rate(self._epoch, batch, self._steps)
        if rate is not None:
            self._set(rate)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    # ---- what the two differ in

    @abc.abstractmethod
    def _begin(self, epoch: int) -> None:
        """Prepare for a run whose first epoch is `epoch`."""

    @abc.abstractmethod
    def _ramps(self, epoch: int) -> bool:
        """Return whether the rate changes within `epoch`."""

    @abc.abstractmethod
    def _rate(self, epoch: int, batch: int, steps: int) -> float | None:
        """Return the learning rate of batch `batch` of `steps`, or None to leave it as it is."""

    # ---- what they share

    def _factor(self) -> float:
        return float(self._devices if self._scale == "size" else self._scale or 1)

    def _first_share(self) -> float:
        """Return which share of its target the rate has in the first batch of a warm-up."""
        return 1 / (self._devices if self._scale in (None, "size") else float(self._scale))

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        after = float(optimizer.learning_rate)
        if self._momentum_correction and after != before:
            correct_momentum(optimizer, before, after)
        if optimizer in _BASES:
            _BASES[optimizer] = (_BASES[optimizer][0], after)

    def _say(self, text: str) -> None:
        if (self.params or {}).get("verbose") and is_chief():
            ranks = world().size
            sys.stdout.write(f"mgpu: {text}; {self._devices} devices = {ranks} ranks x {self._devices // ranks}\n")


class LearningRateWarmup(_PerBatch):
    """Raise the learning rate batch by batch to its target over the first epochs, then leave it alone.

    Batch b of n in epoch e is at p = (e + b/n) / epochs of the warm-up, and has target * (s + (1 - s) * p) with
    s = 1 / (ranks x towers); with `scale` a number k, s = 1 / k. From p = 1 the rate is the target, and others, such
    as ReduceLROnPlateau, may change it.

    Args:
        epochs: length of the warm-up, more than 0; may be fractional. 5 in the paper.
        scale: None takes the optimizer's learning rate as the target: scale it yourself, or not. "size" takes it as
            the rate for one device, and multiplies it by ranks x towers for the target; a number of 1 or more
            multiplies by that.
        learning_rate: in the place of the optimizer's. Needed to resume within the warm-up from a file loaded before
            fit(), since the optimizer then has the rate of the batch that it was saved in.
        steps_per_epoch: batches in an epoch, where Keras cannot know.
        momentum_correction: see `correct_momentum`.

    Raises:
        ModelError: an argument out of its range; the optimizer's rate is a schedule; the length of an epoch or the
            target is not known.

    Source:
        Goyal et al. 2017, arXiv:1706.02677, section 2.1 (linear scaling), section 2.2 (gradual warm-up: a constant
        increment at each iteration), section 3 (momentum correction).
    """

    def __init__(
        self,
        epochs: float = 5,
        *,
        scale: float | str | None = None,
        learning_rate: float | None = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__(scale, steps_per_epoch, momentum_correction, "LearningRateWarmup")
        if epochs <= 0:
            raise ModelError(
                f"LearningRateWarmup(epochs={epochs}): a warm-up lasts more than 0 epochs. Leave the callback out, "
                "or give it the paper's length: LearningRateWarmup(epochs=5)"
            )
        self._epochs = epochs
        self._asked = learning_rate
        self._target = 0.0
        self._ends = 0.0

    def _begin(self, epoch: int) -> None:
        optimizer = self.model.optimizer
        now = float(optimizer.learning_rate)
        found, steps_made = self._found or (now, _steps_made(optimizer))
        base, last = _BASES.get(optimizer, (found, None))
        known = last is not None and last == found  # by an earlier fit(); nobody has set another since
        if not known:
            base = found
        if self._asked is not None:
            base, known = self._asked, True
        restored = _steps_made(optimizer) > 0
        # Past the warm-up a restored optimizer has its rate, which may have been lowered since.
        self._ends = self._epochs if not (restored and epoch >= self._epochs) else -1.0
        if self._ends < 0:
            return
        if steps_made > 0 and not known and (epoch > 0 or self._scale is not None):
            raise ModelError(
                f"LearningRateWarmup(epochs={self._epochs}, scale={self._scale!r}) begins at epoch {epoch} with an "
                f"optimizer that has made {steps_made} steps and has the learning rate {found:.6g}. It was loaded "
                "from a file, and that may be the rate of the batch it was saved in, or be scaled already. Give the "
                "rate that the model was first compiled with: LearningRateWarmup(..., learning_rate=0.1)"
            )
        _BASES[optimizer] = (base, now)
        self._target = base * self._factor()
        self._say(
            f"learning rate {base:.6g} x {self._factor():g} = {self._target:.6g}, from "
            f"{self._target * self._first_share():.6g} over {self._epochs} epochs"
        )

    def _ramps(self, epoch: int) -> bool:
        return epoch < self._ends and self._first_share() < 1

    def _rate(self, epoch: int, batch: int, steps: int) -> float | None:
        if self._ends < 0:
            return None
        if epoch + batch / steps >= self._ends:
            self._ends = -1.0
            return self._target
        share, progress = self._first_share(), (epoch + batch / steps) / self._epochs
        return self._target * (share + (1 - share) * progress)


class LearningRateSchedule(_PerBatch):
    """Give the learning rate as a function of the epoch, with fractions of an epoch.

    The rate that the optimizer was compiled with plays no part, so that nothing can be scaled twice.

    Args:
        schedule: a function of the epoch (float: epoch + batch / batches) that returns the learning rate; or a dict of
            epoch -> rate from that epoch on, which begins at 0; or a keras.optimizers.schedules.LearningRateSchedule,
            asked for step = epoch * batches + batch.
        warmup_epochs: during these the rate is multiplied by a share that goes from 1 / (ranks x towers), or 1 / scale
            for a number, to 1 batch by batch. 0: none.
        scale: None, "size" or a number of 1 or more: what the schedule's rates are multiplied by, as in
            `LearningRateWarmup`.
        steps_per_epoch: batches in an epoch, where Keras cannot know.
        momentum_correction: see `correct_momentum`.

    Raises:
        ModelError: `schedule` is none of these; the optimizer's rate is a schedule; the length of an epoch is not
            known.

    Source:
        As for `LearningRateWarmup`.
    """

    def __init__(
        self,
        schedule: Callable[[float], float] | Mapping[float, float] | Any,
        *,
        warmup_epochs: float = 0,
        scale: float | str | None = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__(scale, steps_per_epoch, momentum_correction, "LearningRateSchedule")
        stairs = isinstance(schedule, Mapping) and bool(schedule) and min(schedule) <= 0
        if not (stairs or callable(schedule)):
            raise ModelError(
                f"LearningRateSchedule({schedule!r}) is neither a function of the epoch, nor a dict of rates that "
                "begins at epoch 0, nor a schedule of Keras. For a rate that falls at epoch 30: "
                "LearningRateSchedule({0: 0.1, 30: 0.01})"
            )
        self._schedule = schedule
        self._warmup_epochs = warmup_epochs

    def _begin(self, epoch: int) -> None:
        self._say(f"learning rate by a schedule x {self._factor():g}, warm-up {self._warmup_epochs} epochs")

    def _ramps(self, epoch: int) -> bool:
        if isinstance(self._schedule, Mapping):
            return epoch < self._warmup_epochs or any(epoch < start < epoch + 1 for start in self._schedule)
        return True

    def _rate(self, epoch: int, batch: int, steps: int) -> float | None:
        schedule, at = self._schedule, epoch + batch / steps
        if isinstance(schedule, Mapping):
            rate = schedule[max(start for start in schedule if start <= at)]
        elif isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            rate = schedule(epoch * steps + batch)
        else:
            rate = schedule(at)
        share = self._first_share() if at < self._warmup_epochs else 1.0
        if share < 1:
            share += (1 - share) * at / self._warmup_epochs
        return float(rate) * self._factor() * share


def correct_momentum(optimizer: keras.optimizers.Optimizer, before: float, after: float) -> None:
    """Multiply the velocities of an SGD by `after / before`, for a learning rate that has just changed so.

    Keras keeps v = m * v - lr * g, which has the learning rates of the past in it: after a rise the momentum would be
    too small by the ratio, after a fall too large. Corrected once when the rate changes, v = -lr * u with
    u = m * u + g, so that the weights move as if the rate stood outside of the momentum (also with Nesterov's).
    Of other optimizers nothing is changed: the averages of Adam and its like have no learning rate in them.

    Args:
        optimizer: any; a LossScaleOptimizer for what it wraps.
        before: the rate of the last step. From 0 there is nothing to correct.
        after: the rate of the next step.

    Source:
        Goyal et al. 2017, arXiv:1706.02677, section 3, remark 2: equations (9) and (10), and the factor
        lr[t+1] / lr[t] for the form (10), which is that of Keras.
    """
    inner = _innermost(optimizer)
    velocities = getattr(inner, "momentums", None)
    if isinstance(inner, keras.optimizers.SGD) and velocities and before:
        _multiply([velocity.value for velocity in velocities], tf.constant(after / before, tf.float64))


@tf.function(reduce_retracing=True)
def _multiply(variables: Sequence[tf.Variable], factor: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))


def _settable(rate: Any) -> bool:
    # The value of a schedule is a tensor. Early Keras 3 has variables that are no keras.Variable.
    return hasattr(rate, "assign")


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _steps_made(optimizer: Any) -> int:
    return int(_innermost(optimizer).iterations)
