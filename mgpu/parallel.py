"""make_parallel() and the model it returns: the wiring of towers, staging, strategy and Keras' own trainer."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from mgpu import checks, placement
from mgpu.devices import resolve_devices
from mgpu.runtime import DatasetHook, Plan, Runtime
from mgpu.sources import guarded
from mgpu.strategies import GradientStrategy, resolve


def make_parallel(
    model: keras.Model,
    gpus: int | str | Sequence[Any] | None = None,
    *,
    strategy: str | GradientStrategy = "auto",
    ps_device: str | Sequence[str] = "auto",
    staging_depth: int = 1,
    loss_scope: str = "auto",
    data_shard: str = "rows",
) -> keras.Model:
    """Return `model` as one that trains, evaluates and predicts on several devices, with the same numbers.

    The returned model is of the same class and *is* the same model: layers, weights, optimizer and compiled
    losses are shared, so whatever is done to one is done to both. Only how a batch is computed differs. Files
    written by it are those of `model`, and load without mgpu.

    Batch size stays global: a batch of B rows on T towers gives tower t the rows [B*t//T, B*(t+1)//T).

    Args:
        model: any Keras 3 model that `fit` takes; built or not, compiled or not.
        gpus: how many devices, their ids or names, or None for all that this process sees; see
            `mgpu.get_available_gpus`. Without GPUs, logical CPU devices stand in.
        strategy: "auto" (a `ParameterServer`, or nothing to combine for one device), "parameter_server",
            "single", or an instance.
        ps_device: where the variables live: "auto" (the first tower), a device name, a list of names, or
            "spread" (divided over the towers by bytes).
        staging_depth: batches kept ready on each device, 0 or more. 0 gives the same numbers; each one more
            costs the memory of a batch.
        loss_scope: "auto" cuts losses that are known to look at one row at a time, and gathers the outputs
            for any other; "batch" always gathers; "tower" lets each tower compute its part, weighed by rows.
        data_shard: "rows", "batches" or "none": how ranks share a dataset. All the same with one process.

    Returns:
        A model of the class of `model`. It has, besides: `towers` (device names), `plain_model` (`model`),
        `describe()` and `staging_sizes()`.

    Raises:
        DeviceError: no such device, or one asked for twice.
        StrategyError: an unknown strategy, or one that does not fit.
        ModelError: the model cannot be trained so with the plain model's numbers; the message names the
            layer or method and the remedy.

    Example:
        >>> import keras, mgpu
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = mgpu.make_parallel(model, gpus=["/CPU:0"])
        >>> model.compile("sgd", "mse")
        >>> model.towers
        ('/CPU:0',)
    """
    plain = checks.plain_model(model)
    towers = tuple(resolve_devices(gpus))
    plan = Plan(
        towers=towers,
        strategy=resolve(strategy, ps_device, towers),
        staging_depth=checks.staging_depth(staging_depth),
        loss_scope=checks.one_of("loss_scope", loss_scope, ("auto", "batch", "tower")),
        data_shard=checks.one_of("data_shard", data_shard, ("rows", "batches", "none")),
    )
    checks.refuse_unfit(plain, towers)
    placement.refuse_scattered(plain, ps_device if isinstance(strategy, str) else strategy)
    return _view(plain, Runtime(plain, plan))


class ParallelModel:
    """What the returned model does differently. Its class is made from this one and the model's own.

    The object shares its `__dict__` with the plain model: there is one set of layers, weights, optimizer and
    compiled losses, and neither can fall out of step. It also claims the plain model's class, so that every
    way of saving, cloning or inspecting a model (`keras.saving`, callbacks, `isinstance`) sees the plain one.
    """

    _mgpu: Runtime

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._mgpu.plain)

    def __reduce__(self) -> Any:
        return self._mgpu.plain.__reduce__()

    @property
    def towers(self) -> tuple[str, ...]:
        """The devices that run a copy of the computation each."""
        return self._mgpu.plan.towers

    @property
    def plain_model(self) -> keras.Model:
        """The model that was made parallel: the same weights, trained in Keras' own way."""
        return self._mgpu.plain

    def describe(self) -> dict:
        """Return what the model runs on: towers, strategy, devices of the variables, staging."""
        return self._mgpu.describe()

    def staging_sizes(self) -> dict[str, list[int]]:
        """Return, for "train", "test" and "predict", how many batches each tower has staged now."""
        return self._mgpu.staging_sizes()

    # ---- Keras' hooks: who distributes a dataset, and what a step is

    @property
    def distribute_strategy(self) -> DatasetHook:
        return DatasetHook(self._mgpu)

    def make_train_function(self, force: bool = False) -> Callable:
        return self._mgpu.make_function("train", force)

    def make_test_function(self, force: bool = False) -> Callable:
        return self._mgpu.make_function("test", force)

    def make_predict_function(self, force: bool = False) -> Callable:
        return self._mgpu.make_function("predict", force)

    @property
    def train_function(self) -> Callable | None:
        return self._mgpu.functions.get("train")

    @train_function.setter
    def train_function(self, value: Callable | None) -> None:
        self._mgpu.functions["train"] = value

    @property
    def test_function(self) -> Callable | None:
        return self._mgpu.functions.get("test")

    @test_function.setter
    def test_function(self, value: Callable | None) -> None:
        self._mgpu.functions["test"] = value

    @property
    def predict_function(self) -> Callable | None:
        return self._mgpu.functions.get("predict")

    @predict_function.setter
    def predict_function(self, value: Callable | None) -> None:
        self._mgpu.functions["predict"] = value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as the plain model does (same arguments), and the plain model with it."""
        self._mgpu.plain.compile(*args, **kwargs)
        self._mgpu.functions.clear()

    # ---- nothing staged is left behind, and a source's own error reaches the caller

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train as `keras.Model.fit` does (same arguments)."""
        with self._mgpu.session("train", _verbose(args, kwargs)), guarded(args, kwargs) as (args, kwargs):
            return super().fit(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as `keras.Model.evaluate` does (same arguments)."""
        with self._mgpu.session("test", 0), guarded(args, kwargs) as (args, kwargs):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as `keras.Model.predict` does (same arguments)."""
        with self._mgpu.session("predict", 0), guarded(args, kwargs) as (args, kwargs):
            return super().predict(*args, **kwargs)  # type: ignore[misc]


def _verbose(args: tuple, kwargs: dict) -> Any:
    position = 4  # of `verbose` in fit(x, y, batch_size, epochs, verbose, ...)
    return args[position] if len(args) > position else kwargs.get("verbose", "auto")


def _view(plain: keras.Model, runtime: Runtime) -> keras.Model:
    cls = type(plain)
    parallel_class = type(
        cls.__name__,
        (ParallelModel, cls),
        {"_mgpu": runtime, "__module__": cls.__module__, "__doc__": cls.__doc__},
    )
    view: Any = object.__new__(parallel_class)
    object.__setattr__(view, "__dict__", plain.__dict__)
    return view
