"""One step: all towers on the parts of one batch, and what they found combined and written once.

T = towers, B = rows in the batch. `parts[t][i]` is the part of tower t of the i-th tensor of the batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context  # no public name for the options of a function call

from mgpu.data.split import Layout, join, rows_per_tower
from mgpu.errors import ModelError
from mgpu.losses import flat_losses, is_rowwise
from mgpu.merge import merge_state, starting_value
from mgpu.recipe import Recipe, TotalsFirst, UnknownPenalties, UnknownState, first_recipe
from mgpu.strategies import GradientStrategy
from mgpu.towers import Tower, nothing_if_empty, zeros_if_empty

HOST = "/CPU:0"


class SingleStep:
    """The step of one tower: Keras' own `train_step`, `test_step` or `predict_step`, on the tower's device."""

    def __init__(self, model: keras.Model, layout: Layout, mode: str, device: str) -> None:
        self._layout = layout
        self._device = device
        step = {"train": model.train_step, "test": model.test_step, "predict": model.predict_step}[mode]
        if model.jit_compile and not model.run_eagerly:
            step = tf.function(step, jit_compile=True, reduce_retracing=True, autograph=False)
        self._step = step

    def prepare(self, sample: Callable[[], list]) -> None:
        """Nothing has to be found out about the model."""

    def notes(self) -> list[str]:
        """Nothing has to be said about the step."""
        return []

    def run(self, rows: tf.Tensor, parts: Sequence[Sequence[Any]], ready: tf.Tensor) -> Any:
        """Run the step; see `TowerStep.run`."""
        with tf.device(self._device), tf.control_dependencies([ready]):
            return self._step(self._layout.pack(parts[0]))


class TowerStep:
    """The step of several towers, for one model, mode and batch layout."""

    def __init__(
        self,
        model: keras.Model,
        layout: Layout,
        mode: str,
        *,
        towers: Sequence[str],
        strategy: GradientStrategy,
        loss_scope: str,
    ) -> None:
        self._model = model
        self._layout = layout
        self._towers = tuple(towers)
        self._strategy = strategy
        self._recipe = first_recipe(model, mode, loss_scope)
        self._lockstep = any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
        self._lockstep = self._lockstep and mode == "train"
        self._rebuild()

    # ---- what has to be known before the step can be traced

    def prepare(self, sample: Callable[[], list]) -> None:
        """Trace the tower, and change the recipe until it fits the model.

        Args:
            sample: returns the tensors of a part with at least one row; called only if the model's layers add
                losses, to find out whether those are means or sums.
        """
        while True:
            try:
                if self._lockstep or self._model.run_eagerly:
                    self._scratch_trace()
                else:
                    self._function.get_concrete_function()
                return
            except TotalsFirst:
                self._recipe.totals_first = True
            except UnknownState as found:
                self._recipe.extra_state += found.variables
            except UnknownPenalties:
                self._recipe.penalty_kinds = self._probe_penalties(sample())
            self._rebuild()

    def notes(self) -> list[str]:
        """Return what the user should know about how this model is trained: a sentence each."""
        if self._recipe.loss_scope != "gather":
            return []
        custom = [loss.name for loss in flat_losses(self._model._compile_loss) if not is_rowwise(loss)]
        what = f"the loss {custom[0]!r} may look" if custom else "the loss looks"
        return [
            f"{what} at the whole batch, so every step moves the model's outputs of all towers to "
            f"{self._towers[0]} and computes it there once. If it looks at one row at a time, declare it: "
            "loss=mgpu.rowwise(loss)"
        ]

    def _rebuild(self) -> None:
        self._tower = Tower(self._model, self._layout, self._recipe)
        fused = self._recipe.mode == "train" and not self._split
        body: Callable = self._tower.train if fused else self._tower.evaluate
        if self._model.run_eagerly:
            self._function: Any = body
            return
        scalar = tf.TensorSpec((), tf.float32)
        self._function = tf.function(
            body,
            input_signature=[*self._tower.signature(), *([scalar, scalar] if fused else [])],
            autograph=False,
            jit_compile=self._model.jit_compile or None,
            # Kept whole, the function is optimised once and not once per tower.
            experimental_attributes={"_noinline": True},
        )

    @property
    def _split(self) -> bool:
        """Whether the forward passes of all towers end before the first backward pass begins."""
        return self._recipe.totals_first or self._recipe.loss_scope == "gather" or self._lockstep

    def _scratch_trace(self) -> None:
        # Finds out the same things as tracing the tower would, where no traced tower is used.
        @tf.function(input_signature=self._tower.signature()[:-1], autograph=False)
        def scratch(weights: list, state: list, part: list) -> tf.Tensor:
            result = self._tower.forward(weights, state, part)
            self._tower.scaled_penalties(result, tf.ones(()))
            if "data" in self._tower.kinds and not self._recipe.totals_first:
                raise TotalsFirst
            return tf.zeros(())

        scratch.get_concrete_function()

    def _probe_penalties(self, part: list) -> list[str]:
        """Return "mean" or "sum" for each loss that a layer adds: double the rows, and see what doubles."""
        weights = [tf.convert_to_tensor(v.value) for v in self._tower.trainable]
        state = [tf.convert_to_tensor(v.value) for v in self._tower.state]
        recipe = Recipe("test", self._recipe.loss_scope, tally_metrics=False, penalty_kinds=[])
        probe = Tower(self._model, self._layout, recipe)
        probe.state = self._tower.state
        doubled = [part_i if part_i.shape.rank == 0 else _twice(part_i) for part_i in part]
        once, twice = (probe.forward(weights, state, rows)["penalties"] for rows in (part, doubled))
        kinds = []
        for before, after, layer in zip(once, twice, probe.added_by, strict=True):
            before, after = float(before), float(after)
            if abs(after - before) <= 1e-3 * abs(before):
                kinds.append("mean")
            elif abs(after - 2 * before) <= 1e-3 * abs(before):
                kinds.append("sum")
            else:
                raise ModelError(
                    f"The layer {layer!r} adds a loss that is neither a mean nor a sum over rows: it is {before:.6g} "
                    f"for some rows and {after:.6g} for the same rows twice. It probably compares rows of the batch, "
                    f"and {len(self._towers)} towers each see a part of it. Compute it from the model's outputs in "
                    "the compiled loss, or pass loss_scope='tower' to let each tower compute its part."
                )
        return kinds

    # ---- the step itself

    def run(self, rows: tf.Tensor, parts: Sequence[Sequence[Any]], ready: tf.Tensor) -> Any:
        """Train on, test or predict one batch.

        Args:
            rows: B, a scalar int64 on the host.
            parts: T lists of tensors; those of an empty tower hold one row that does not count.
            ready: a tensor on which everything that is written waits: the next batch has been read, so that
                a failing source leaves weights, metrics and staged batches as they were.

        Returns:
            The logs, as Keras' train_step returns them; for "predict" the outputs of the whole batch.
        """
        recipe, model, tower = self._recipe, self._model, self._tower
        train = recipe.mode == "train"
        with tf.device(HOST):
            counts = rows_per_tower(rows, len(self._towers))
            shares = [tf.cast(c / tf.maximum(rows, 1), tf.float32) for c in counts]
            reals = [tf.cast(c, tf.int32) for c in counts]  # int32 stays on the host, also beside a GPU
        weights, state = _read(tower.trainable), _read(tower.state)
        scale = tf.ones(())
        if train and model.optimizer is not None:
            scale = tf.cast(model.optimizer.scale_loss(tf.ones(())), tf.float32)

        if train and not self._split:
            results = self._on_each_tower(
                lambda t: self._function(weights, self._state_of(t, state), parts[t], reals[t], shares[t], scale)
            )
            loss = self._head(results, counts, shares, parts)
            gradients = [r["gradients"] for r in results]
        elif train:
            results, loss, gradients = self._split_train(weights, state, parts, counts, shares, reals, scale)
        else:
            results = self._on_each_tower(
                lambda t: self._function(weights, self._state_of(t, state), parts[t], reals[t])
            )
            loss = None if recipe.mode == "predict" else self._head(results, counts, shares, parts)

        with tf.control_dependencies([ready]):
            if train:
                self._apply(gradients)
            self._write_state(state, results, counts)
            if recipe.mode == "predict":
                return self._joined_outputs(results, counts)
            return self._logs(loss, results, rows, shares, counts, parts)

    def _state_of(self, tower: int, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [starting_value(v, s, tower) for v, s in zip(self._tower.state, state, strict=True)]

    def _on_each_tower(self, call: Callable[[int], dict]) -> list[dict]:
        results = []
        with _optimised_once():
            for t, device in enumerate(self._towers):
                with tf.device(device):
                    results.append(call(t))
        return results

    def _split_train(
        self, weights: list, state: list, parts: Sequence, counts: list, shares: list, reals: list, scale: tf.Tensor
    ) -> tuple[list[dict], tf.Tensor, list[list]]:
        """Run all forward passes, compute the loss of the whole batch, and differentiate through all towers."""
        copies = []
        for device in self._towers:
            with tf.device(device):
                copies.append([tf.identity(w) for w in weights])

        def forward() -> tuple[list[dict], tf.Tensor, tf.Tensor]:
            if self._lockstep:
                from mgpu.lockstep import run_in_lockstep

                raw = run_in_lockstep(
                    self._towers,
                    lambda t: self._tower.forward(copies[t], self._state_of(t, state), parts[t]),
                    counts,
                )
                results = [nothing_if_empty(r, c) for r, c in zip(raw, counts, strict=True)]
            else:
                results = self._on_each_tower(
                    lambda t: self._function(copies[t], self._state_of(t, state), parts[t], reals[t])
                )
            loss = self._head(results, counts, shares, parts)
            return results, loss, loss * tf.cast(scale, loss.dtype)

        sources = [w for copy in copies for w in copy]
        if tf.executing_eagerly():
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                results, loss, scaled = forward()
            flat = tape.gradient(scaled, sources)
        else:
            results, loss, scaled = forward()
            # The graph's own gradients, since they stay on the device of the pass that they differentiate.
            flat = tf.compat.v1.gradients(scaled, sources, colocate_gradients_with_ops=True)
        gradients, size = [], len(weights)
        for t, device in enumerate(self._towers):
            with tf.device(device):
                gradients.append(zeros_if_empty(list(flat[t * size : (t + 1) * size]), counts[t]))
        return results, loss, gradients

    def _head(self, results: list[dict], counts: list, shares: list, parts: Sequence) -> tf.Tensor:
        """Return the loss of the whole batch, unscaled."""
        recipe, model, tower = self._recipe, self._model, self._tower
        with tf.device(HOST if not self._split else self._towers[0]):
            penalties = _sum_over_towers(
                [tower.scaled_penalties(r, share) for r, share in zip(results, shares, strict=True)]
            )
            if recipe.loss_scope == "gather":
                x, y, sample_weight = self._joined_batch(parts, counts)
                y_pred = self._joined_outputs(results, counts)
                override, model._losses_override = model._losses_override, penalties
                try:
                    return model._compute_loss(x, y, y_pred, sample_weight, training=recipe.mode == "train")
                finally:
                    model._losses_override = override
            numerators = _sum_over_towers([r["numerators"] for r in results])
            denominators = _sum_over_towers([r["denominators"] for r in results])
            losses = [
                n if kind == "sum" else tf.math.divide_no_nan(n, d)
                for n, d, kind in zip(numerators, denominators, tower.kinds, strict=True)
            ]
            _, y, _ = keras.utils.unpack_x_y_sample_weight(self._layout.pack(parts[0]))
            stand_in = tf.zeros(tf.stack([tf.add_n(list(counts)), 1]))
            y_pred = tf.nest.map_structure(lambda _: stand_in, tower.output_structure)
            return tower.total(losses, penalties, y, y_pred, record=True)

    def _apply(self, gradients: list[list]) -> None:
        model = self._model
        if not self._tower.trainable:
            return
        homes = [v.value.device for v in self._tower.trainable]
        combined = self._strategy.combine(gradients, homes)
        model.optimizer.apply_gradients(zip(combined, self._tower.trainable, strict=True))

    def _write_state(self, old: list, results: list[dict], counts: list) -> None:
        tower = self._tower
        for position, index in enumerate(tower.changed_state):
            variable = tower.state[index]
            with tf.device(variable.value.device):
                new = [r["state"][position] for r in results]
                variable.assign(merge_state(variable, old[index], new, counts))
        for position, variable in enumerate(tower.tallies):
            with tf.device(variable.value.device):
                variable.assign(variable + tf.add_n([r["tallies"][position] for r in results]))

    def _logs(
        self, loss: tf.Tensor, results: list[dict], rows: tf.Tensor, shares: list, counts: list, parts: Sequence
    ) -> dict:
        model, tower = self._model, self._tower
        model._loss_tracker.update_state(loss, sample_weight=tf.cast(rows, tf.int32))
        for position, variable in enumerate(tower.trackers):
            changes = [r["trackers"][position] for r in results]
            weighed = [c * tf.cast(s, c.dtype) for c, s in zip(changes, shares, strict=True)]
            variable.assign(variable + tf.add_n(weighed))
        if self._recipe.tally_metrics:
            return model.get_metrics_result()
        x, y, sample_weight = self._joined_batch(parts, counts)
        return model.compute_metrics(x, y, self._joined_outputs(results, counts), sample_weight=sample_weight)

    def _joined_batch(self, parts: Sequence, counts: list) -> tuple[Any, Any, Any]:
        whole = [join(tensors, counts) if tensors[0].shape.rank else tensors[0] for tensors in zip(*parts, strict=True)]
        return keras.utils.unpack_x_y_sample_weight(self._layout.pack(whole))

    def _joined_outputs(self, results: list[dict], counts: list) -> Any:
        tower = self._tower
        leaves = [join(outputs, counts) for outputs in zip(*(r["outputs"] for r in results), strict=True)]
        masks = iter([join(m, counts) for m in zip(*(r["masks"] for r in results), strict=True)])
        for leaf, masked in zip(leaves, tower.masked, strict=True):
            if masked:
                leaf._keras_mask = next(masks)
        return tf.nest.pack_sequence_as(tower.output_structure, leaves)


@contextlib.contextmanager
def _optimised_once() -> Iterator[None]:
    """Call functions so that the runtime does not run its graph optimiser over them again for each call.

    The optimiser has been over the one traced tower already, as a function of the graph that calls it. Without
    this, the first step of ResNet50 on 8 towers took 75 s of processor time, with it 52 s; later steps the same.
    """
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    current = context.context()
    before = current.function_call_options
    current.function_call_options = context.FunctionCallOptions(config_proto=config)
    try:
        yield
    finally:
        current.function_call_options = before


def _read(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    values = []
    for variable in variables:
        with tf.device(variable.value.device):
            values.append(tf.convert_to_tensor(variable.value))
    return values


def _sum_over_towers(per_tower: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    return [tf.add_n(list(values)) for values in zip(*per_tower, strict=True)]


def _twice(tensor: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=[tensor, tensor])
    return tf.concat([tensor, tensor], axis=0)
