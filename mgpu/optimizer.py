"""DistributedOptimizer(): any Keras optimizer, which averages gradients over ranks before it applies them.

V = trainable variables.
"""

import sys
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from mgpu.cluster.world import World, world
from mgpu.errors import RankError, StrategyError
from mgpu.strategies.allreduce import AllreduceStrategy
from mgpu.strategies.horovod import Horovod, is_installed
from mgpu.strategies.mpi import MPI
from mgpu.variables import describe, difference, has_value, value_of

_STRATEGIES: dict[str, type[AllreduceStrategy]] = {"horovod": Horovod, "mpi": MPI}
# What compression rounded away belongs to the gradients of one optimizer.
_feeding_back: weakref.WeakSet[AllreduceStrategy] = weakref.WeakSet()


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, strategy: str | AllreduceStrategy = "auto"
) -> keras.optimizers.Optimizer:
    """Return `optimizer` as one that applies the mean over ranks of the gradients that it is given.

    For a training loop of your own, or a model that overrides `train_step` (a GAN), with one device per rank. A
    model that Keras' own step can train needs none: `make_parallel` weighs ranks by rows, and sums losses and
    metrics, too. The returned optimizer *is* the given one, with the same class, slots and file format, so saved
    models load without mgpu; wrap the optimizer of a loaded model again.

    The mean takes each rank to have as many rows as any other, with a loss that is a mean over its rows. Gradients
    are combined first and then, in Keras' order, accumulated, clipped and applied once with weight decay and moving
    averages, so that all ranks hold the same weights. Losses, metrics and BatchNormalization's moving statistics
    stay each rank's own. Call `broadcast_variables` before the first step. A step moves about two copies of the
    gradients in and out of each rank. With one rank nothing changes.

    Args:
        optimizer: any Keras 3 optimizer. For float16 wrap the one that scales the loss:
            `DistributedOptimizer(LossScaleOptimizer(Adam()))`; a gradient that overflows on one rank then makes all
            of them skip the step.
        strategy: "auto" (Horovod if every rank has it installed, else MPI), "horovod", "mpi", or an instance.

    Returns:
        An optimizer of the class of `optimizer`, that shares all its state.

    Raises:
        StrategyError: `optimizer` is no Keras optimizer, or is distributed already; the strategy is unknown, does
            not exchange over ranks, or its library is missing. When the optimizer is built: it is inside a
            LossScaleOptimizer. When a step is traced: XLA is to compile it, which no exchange can run in.
        RankError: at the first step, on every rank: the ranks' variables or gradients differ in number, shape, dtype
            or form, or the weights do not start with the same values.

    Source:
        Goyal et al. 2017, arXiv:1706.02677, section 3. Unlike `horovod.keras`, which overrides what Keras 3 does not
        call, it does average.

    Example:
        >>> import keras, mgpu
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(mgpu.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise StrategyError(
            f"mgpu.DistributedOptimizer({optimizer!r}) is of type {type(optimizer).__name__}, not a Keras optimizer. "
            "Pass keras.optimizers.Adam() or another of keras.optimizers; a name by keras.optimizers.get('adam')."
        )
    for layer in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(getattr(type(layer), "_mgpu", None), _Averager):
            name = optimizer.__class__.__name__
            raise StrategyError(
                f"mgpu.DistributedOptimizer({name}) was asked for; the {layer.__class__.__name__} is distributed "
                "already, and its gradients would be averaged twice. Wrap once, the outermost optimizer: "
                f"mgpu.DistributedOptimizer(keras.optimizers.{name}(...))."
            )
    averager = _Averager(optimizer, _resolve(strategy))
    cls = type(optimizer)
    distributed_class = type(
        cls.__name__,
        (_OverRanks, cls),
        {"_mgpu": averager, "__module__": cls.__module__, "__doc__": cls.__doc__},
    )
    view: Any = object.__new__(distributed_class)
    object.__setattr__(view, "__dict__", optimizer.__dict__)
    return view


class _OverRanks:
    """What the returned optimizer does differently; its class is made from this one and the optimizer's own."""

    _mgpu: "_Averager"
    _trainable_variables: list[Any]

    # Whatever saves or clones an optimizer sees the plain one.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._mgpu.plain)

    def __reduce__(self) -> Any:
        return self._mgpu.plain.__reduce__()

    def build(self, variables: Any) -> None:
        _refuse_loss_scale_outside(self)
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Apply the mean over ranks of `grads`, as the plain optimizer applies gradients (same arguments)."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        super().apply(self._mgpu.average(grads, known), trainable_variables)  # type: ignore[misc]


class _Averager:
    """Averages the gradients of one optimizer over the ranks of its strategy."""

    def __init__(self, plain: keras.optimizers.Optimizer, strategy: AllreduceStrategy | None) -> None:
        self.plain = plain
        self._strategy = strategy
        self._compared = False

    @tf.autograph.experimental.do_not_convert
    def average(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return V gradients, each the mean over ranks; None stays None."""
        strategy = self._strategy
        if strategy is None or len(gradients) != len(variables):  # which Keras refuses in its own words
            return gradients
        _refuse_xla(strategy)
        if not self._compared:
            _refuse_differences(strategy.world, gradients, variables)
            self._compared = True
        size = strategy.world.size
        shares = [_divided(gradient, variable, size) for gradient, variable in zip(gradients, variables, strict=True)]
        means, _ = strategy.exchange(shares, [], tf.constant(1 / size))
        return means


def _divided(gradient: Any, variable: Any, size: int) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape
        shape = tf.constant(tuple(variable.shape), gradient.indices.dtype) if shape is None else shape
        return tf.IndexedSlices(_divided(gradient.values, variable, size), gradient.indices, shape)
    gradient = tf.convert_to_tensor(gradient)
    # Before the sum, which would overflow in float16 where the mean does not.
    return gradient / tf.cast(size, gradient.dtype)


# ---- what is refused, before anything is exchanged


def _resolve(strategy: str | AllreduceStrategy) -> AllreduceStrategy | None:
    """Return the strategy that `DistributedOptimizer(strategy=...)` asks for, None where this rank is alone."""
    names = ("auto", *_STRATEGIES)
    if isinstance(strategy, AllreduceStrategy):
        chosen = strategy
    elif not isinstance(strategy, str) or strategy not in names:
        raise StrategyError(
            f"mgpu.DistributedOptimizer(strategy={strategy!r}) does not exchange gradients over ranks. Use one of "
            f"{', '.join(map(repr, names))}, or an instance such as mgpu.MPI(compression='bfloat16')."
        )
    elif world().size == 1:
        return None
    elif strategy == "auto":
        # One rank without Horovod would wait for the others in MPI.
        chosen = Horovod() if all(world().gather(is_installed(), "the choice of a strategy")) else MPI()
    else:
        chosen = _STRATEGIES[strategy]()
    if chosen._error_feedback:
        if chosen in _feeding_back:
            kind = type(chosen).__name__
            raise StrategyError(
                f"mgpu.DistributedOptimizer(strategy={kind}(error_feedback=True)) got an instance that another "
                "optimizer has; what was rounded away from the gradients of one would be added to the other's. Make "
                f"one for each: mgpu.{kind}(compression={chosen._compression!r}, error_feedback=True)."
            )
        _feeding_back.add(chosen)
    return chosen if chosen.world.size > 1 else None


def _refuse_loss_scale_outside(optimizer: Any) -> None:
    """Refuse to be built by a LossScaleOptimizer around `optimizer`, which looks for overflow on this rank alone.

    It applies gradients in a branch that only ranks without overflow take, where they would wait for the others.
    Keras makes one by itself when it compiles a "mixed_float16" model, and tells the inner optimizer nothing about
    it: who calls can only be read off the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.LossScaleOptimizer) and owner.inner_optimizer is optimizer:
            name = optimizer.__class__.__name__
            raise StrategyError(
                f"LossScaleOptimizer(mgpu.DistributedOptimizer({name})) was asked for; that looks for overflow on each "
                "rank before gradients meet, and a rank that skips a step would leave the others waiting. "
                "model.compile() makes it by itself for the policy 'mixed_float16'. Wrap in the other order: "
                f"mgpu.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.{name}(...)))"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _refuse_xla(strategy: AllreduceStrategy) -> None:
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise StrategyError(
            f"A step with mgpu.DistributedOptimizer is to be compiled by XLA, which cannot run an exchange over ranks "
            f"(strategy {strategy.name!r}). Keras chooses XLA by itself where it can: pass "
            "model.compile(..., jit_compile=False), or tf.function(jit_compile=False) in a loop of your own."
        )


def _refuse_differences(group: World, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Refuse, on every rank, gradients that do not fit together and weights that start with different values."""
    every = group.gather(
        [(describe(v), _form(g, v), _checksum(v)) for g, v in zip(gradients, variables, strict=True)],
        "the first step of mgpu.DistributedOptimizer",
    )
    # Paths may differ: a rank that samples or plots may have made layers that others have not.
    differs = difference(
        [[form for _, form, _ in there] for there in every],
        [[f"{described} with {form}" for described, form, _ in there] for there in every],
    )
    if differs:
        raise RankError(
            f"mgpu.DistributedOptimizer cannot average over {group.size} ranks: {differs}. A layer that only some "
            "ranks make, call or train is the usual cause. Make and call the same layers, and set the same "
            "layer.trainable, on every rank."
        )
    for rank, there in enumerate(every):
        for (described, _, first), (_, _, other) in zip(every[0], there, strict=True):
            if first is not None and other is not None and first != other:
                raise RankError(
                    f"mgpu.DistributedOptimizer would train different models: {described} starts with other values on "
                    f"rank {rank} than on rank 0. Each rank drew its own, or only some have read a file. Before the "
                    "first step, on every rank: mgpu.broadcast_variables(model)"
                )


def _form(gradient: Any, variable: Any) -> str:
    if gradient is None:
        return "no gradient"
    kind = "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"
    return f"a {kind} {tf.as_dtype(gradient.dtype).name} gradient of shape {tuple(variable.shape)}"


def _checksum(variable: Any) -> int | None:
    """Return a checksum of the value, None if it has none: a variable that is made in this very trace."""
    with tf.init_scope():
        return zlib.crc32(value_of(variable).tobytes()) if has_value(variable) else None
