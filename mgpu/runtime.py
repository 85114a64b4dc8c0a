"""What a parallel model has and its plain model has not: the plan, traced steps and staging areas."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu import checks, placement
from mgpu.data.split import Layout, part_bounds
from mgpu.feed import Lane, Lanes, StagedDataset, Ticket
from mgpu.step import SingleStep, TowerStep
from mgpu.strategies import GradientStrategy


@dataclasses.dataclass(frozen=True)
class Plan:
    """What make_parallel() was asked for, checked."""

    towers: tuple[str, ...]
    strategy: GradientStrategy
    staging_depth: int
    loss_scope: str
    data_shard: str


class Runtime:
    """Makes steps and staging areas for a model when they are first needed, and void when it changes."""

    def __init__(self, plain: keras.Model, plan: Plan) -> None:
        self.plain = plain
        self.plan = plan
        self.functions: dict[str, Callable | None] = {}
        self.talks = False
        self._compiled_for: Any = None
        self._placed: list[tuple[keras.Variable, Any]] = []
        self._lanes: dict[str, Lanes] = {}
        self._spec_bytes: int | None = None
        self._reset()
        if plain.built:
            self._place()

    def _reset(self) -> None:
        for lanes in self._lanes.values():
            for lane in lanes.all():
                lane.close()
        self._lanes = {mode: Lanes(functools.partial(self._make_lane, mode)) for mode in ("train", "test", "predict")}

    # ---- Keras' hooks

    def make_function(self, mode: str, force: bool) -> Callable:
        # compile() on either object makes a new configuration, and another make_parallel() on the same model may
        # have moved its variables; what was traced before is void then.
        compiled = getattr(self.plain, "_compile_config", None)
        moved = any(variable.value is not place for variable, place in self._placed)
        if compiled is not self._compiled_for or moved:
            self._reset()
            self.functions.clear()
            self._compiled_for = compiled
        if self.functions.get(mode) is None or force:
            self.functions[mode] = self._predict if mode == "predict" else self._lanes[mode].run
        return self.functions[mode]  # type: ignore[return-value]

    def lanes(self, mode: str) -> Lanes:
        return self._lanes[mode]

    def _predict(self, data: Sequence[Any]) -> Any:
        """Keras' predict function: `data` is a list of batches, or of tickets for staged ones."""
        lanes = self._lanes["predict"]
        outputs = [item.redeem() if isinstance(item, Ticket) else lanes.on_batch(item) for item in data]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(_concat, *outputs)

    @contextlib.contextmanager
    def session(self, mode: str, verbose: Any) -> Iterator[None]:
        """Leave nothing staged, however the call ends."""
        self.talks = verbose != 0
        try:
            yield
        finally:
            self._lanes[mode].clear()

    # ---- making a step for a layout of batches

    def _make_lane(self, mode: str, layout: Layout) -> Lane:
        plan, model = self.plan, self.plain
        self._spec_bytes = layout.row_bytes
        placement.build(model, layout)
        checks.refuse_unfit(model, plan.towers)
        self._place()
        if mode == "train" and not model.trainable_variables:
            checks.warn_untrainable(model)
        if len(plan.towers) == 1:
            step: Any = SingleStep(model, layout, mode, plan.towers[0])
        else:
            step = TowerStep(
                model, layout, mode, towers=plan.towers, strategy=plan.strategy, loss_scope=plan.loss_scope
            )
        return Lane(
            step,
            layout,
            towers=plan.towers,
            depth=plan.staging_depth,
            steps_per_execution=model.steps_per_execution if mode != "predict" else 1,
            eager=model.run_eagerly,
            announce=(lambda rows: self._announce(step, rows)) if mode == "train" else lambda rows: None,
        )

    def _place(self) -> None:
        """Bring weights to their homes, and optimizer slots beside their weights."""
        model, plan = self.plain, self.plan
        variables = [v for v in model.variables if isinstance(v.value, tf.Variable)]
        homes = plan.strategy.assign_homes(placement.sizes_bytes(variables), plan.towers)
        moved = placement.move(variables, homes)
        moved |= placement.build_optimizer(model.optimizer if model.compiled else None, model.trainable_variables)
        if moved:
            model.train_function = model.test_function = model.predict_function = None
        model.__dict__[placement.PLACED] = True
        self._placed = [(variable, variable.value) for variable in variables]

    # ---- what the user sees and can ask

    def _announce(self, step: Any, rows: int | None) -> None:
        """Say once, when training starts, what batch size means here and what runs where."""
        if not self.talks:
            return
        plan, where = self.plan, self.describe()
        batch = f"a batch of {rows} rows" if rows is not None else "each batch"
        sizes = [stop - start for start, stop in part_bounds(rows or 0, len(plan.towers))]
        cut = f" ({' + '.join(map(str, sizes))})" if rows is not None and len(sizes) > 1 else ""
        lines = [
            f"{len(plan.towers)} tower{'s' * (len(plan.towers) > 1)} on {', '.join(plan.towers)}; {batch} is one "
            f"step, shared out by rows{cut}; weights on {', '.join(where['variables_on'])} ({where['strategy']}); "
            f"{plan.staging_depth} batch{'es' * (plan.staging_depth != 1)} staged ahead",
            *step.notes(),
        ]
        sys.stdout.write("".join(f"mgpu: {line}\n" for line in lines))

    def staging_sizes(self) -> dict[str, list[int]]:
        sizes = {}
        for mode, lanes in self._lanes.items():
            per_lane = [[int(area.size()) for area in lane.areas] for lane in lanes.all() if lane.areas]
            sizes[mode] = [sum(counts) for counts in zip(*per_lane, strict=True)] or [0] * len(self.plan.towers)
        return sizes

    def describe(self) -> dict:
        variables = [v for v in self.plain.variables if isinstance(v.value, tf.Variable)]
        return {
            "towers": list(self.plan.towers),
            "strategy": self.plan.strategy.name,
            "variables_on": placement.devices_of(variables),
            "staging_depth": self.plan.staging_depth,
            "staged_bytes_per_row": self._spec_bytes,
        }


class DatasetHook:
    """What Keras asks to distribute a dataset; in all else the strategy that TensorFlow has by default."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> StagedDataset:
        return StagedDataset(dataset, lambda: self._runtime.lanes("predict"))

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.distribute.get_strategy(), name)


def _concat(*tensors: Any) -> Any:
    if isinstance(tensors[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=tensors)
    return tf.concat(tensors, axis=0)
