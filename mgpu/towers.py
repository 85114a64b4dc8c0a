"""One forward and backward pass on one part of a batch, as a pure function of weights, state and rows.

Traced once, and called once per tower under the tower's device: start-up then grows little with towers.
V = trainable variables, S = state variables, M = variables of metrics ("tallies").
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu.data.split import Layout
from mgpu.errors import ModelError
from mgpu.losses import Term, loss_terms, total_loss
from mgpu.metrics import is_additive
from mgpu.recipe import Recipe, TotalsFirst, UnknownPenalties, UnknownState


class Tower:
    """The pure function of one tower, for one model, mode and batch layout."""

    def __init__(self, model: keras.Model, layout: Layout, recipe: Recipe) -> None:
        self._model = model
        self._layout = layout
        self._recipe = recipe
        self.trainable = list(model.trainable_variables)
        self.state = [*model.non_trainable_variables, *recipe.extra_state]
        self._compiled = _compiled_metrics(model) if recipe.mode != "predict" else []
        self._own_metrics = _own_metrics(model)
        counted = [*(self._compiled if recipe.tally_metrics else []), *self._own_metrics]
        self.tallies = [v for metric in counted for v in metric.variables]
        # Keras' trackers of single losses. Only a compute_loss that runs on the part touches them here.
        trackers = model._compile_loss.metrics if recipe.loss_scope == "tower" and model._compile_loss else []
        self.trackers = [v for metric in trackers for v in metric.variables]
        self.changed_state: list[int] = []
        self.added_by: list[str] = []

    def signature(self) -> list[Any]:
        """Return the input signature of `evaluate`, and of `train` but for its last two scalars."""
        return [_specs(self.trainable), _specs(self.state), list(self._layout.specs), tf.TensorSpec((), tf.int32)]

    def forward(self, weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor], part: Sequence[Any]) -> dict:
        """Run the model on one part.

        Args:
            weights: V tensors. state: S tensors. part: the tensors of the part, in the layout's order.

        Returns:
            A dict of lists of tensors: "numerators" and "denominators" of the losses, "penalties" added by
            layers, "weight_penalties" (one scalar or none), "state" (new values of `changed_state`),
            "tallies" and "trackers" (changes of metric state), "outputs" and "masks" (leaves of the
            outputs, where asked).
        """
        model, recipe = self._model, self._recipe
        data = self._layout.pack(part)
        tallies = [tf.zeros(v.shape, v.dtype) for v in (*self.tallies, *self.trackers)]
        scope = _RecordingScope(
            [
                *zip(self.trainable, weights, strict=True),
                *zip(self.state, state, strict=True),
                *zip((*self.tallies, *self.trackers), tallies, strict=True),
            ]
        )
        before = dict(scope.state_mapping)
        result: dict[str, list] = {
            "numerators": [],
            "denominators": [],
            "penalties": [],
            "weight_penalties": [],
        }
        self.kinds: list[str] = []
        with scope:
            if recipe.mode == "predict":
                y_pred = model.predict_step(data)
            else:
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
                training = recipe.mode == "train"
                y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
                if recipe.loss_scope == "tower":
                    loss = model._compute_loss(x, y, y_pred, sample_weight, training=training)
                    rows = tf.cast(tf.shape(tf.nest.flatten(part)[0])[0], loss.dtype)
                    self._add_terms(result, [Term(loss * rows, rows, "rows")])
                else:
                    if recipe.loss_scope == "cut":
                        self._add_terms(result, loss_terms(model._compile_loss, y, y_pred, sample_weight))
                    result["penalties"] = self._penalties()
                    if result["penalties"] and recipe.penalty_kinds is None:
                        raise UnknownPenalties
                    of_weights = model._get_regularization_losses()
                    if of_weights:
                        result["weight_penalties"] = [tf.add_n([tf.reduce_sum(p) for p in of_weights])]
                if recipe.tally_metrics and model._compile_metrics is not None:
                    model._compile_metrics.update_state(y, y_pred, sample_weight)
        self._example = (y_pred, None) if recipe.mode == "predict" else (y_pred, y)
        self._note_changes(scope, before)
        result["state"] = [scope.get_current_value(self.state[i]) for i in self.changed_state]
        result["tallies"] = [scope.get_current_value(v) for v in self.tallies]
        result["trackers"] = [scope.get_current_value(v) for v in self.trackers]
        result["outputs"], result["masks"] = [], []
        leaves = tf.nest.flatten(y_pred)
        self.output_structure = tf.nest.map_structure(lambda _: True, y_pred)
        if recipe.return_outputs:
            masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
            self.masked = [mask is not None for mask in masks]
            result["outputs"], result["masks"] = leaves, [m for m in masks if m is not None]
        return result

    def evaluate(
        self, weights: Sequence[tf.Tensor], state: Sequence[tf.Tensor], part: Sequence[Any], rows: tf.Tensor
    ) -> dict:
        """Run the model on one part of `rows` rows (a scalar int32): `forward`, or nothing if there is none."""
        return nothing_if_empty(self.forward(weights, state, part), rows)

    def train(
        self,
        weights: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        part: Sequence[Any],
        rows: tf.Tensor,
        share: tf.Tensor,
        loss_scale: tf.Tensor,
    ) -> dict:
        """Run the model on one part and differentiate this part's summand of the whole batch's loss.

        Args:
            weights, state, part, rows: as for `evaluate`.
            share: scalar float32, the rows of this part over the rows of the batch.
            loss_scale: scalar float32, the factor of the optimizer's loss scaling, or 1.

        Returns:
            What `evaluate` returns, and "gradients": V tensors, IndexedSlices or None.

        Raises:
            TotalsFirst: the share of this part is not its share of the rows.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            result = self.forward(weights, state, part)
            if "data" in self.kinds:
                raise TotalsFirst
            summands = [
                n if kind == "sum" else n / d * tf.cast(share, n.dtype)
                for n, d, kind in zip(result["numerators"], result["denominators"], self.kinds, strict=True)
            ]
            objective = self.total(summands, self.scaled_penalties(result, share), *self._example[::-1])
            objective *= tf.cast(loss_scale, objective.dtype)
        result["gradients"] = [cheaper(g) for g in tape.gradient(objective, list(weights))]
        return nothing_if_empty(result, rows)

    def scaled_penalties(self, result: dict, share: tf.Tensor) -> list[tf.Tensor]:
        """Return this part's summands of the losses that layers add and of the weight penalties."""
        kinds = self._recipe.penalty_kinds or []
        return [
            p if kind == "sum" else p * tf.cast(share, p.dtype)
            for p, kind in zip(result["penalties"], kinds, strict=True)
        ] + [p * tf.cast(share, p.dtype) for p in result["weight_penalties"]]

    def total(self, losses: list, penalties: list, y: Any, y_pred: Any, record: bool = False) -> tf.Tensor:
        """Return the loss to differentiate: the compiled losses, weighted by Keras, and all penalties."""
        if self._recipe.loss_scope == "tower":
            return losses[0]
        compiled = total_loss(self._model._compile_loss, losses, y, y_pred, record=record)
        terms = [] if compiled is None else [compiled]
        terms += penalties
        if not terms:
            raise ModelError(
                f"The model {self._model.name!r} has no loss to compute: compile() got no loss and no layer adds "
                "one. Pass one, for example model.compile(optimizer, loss='mse')."
            )
        return tf.add_n([tf.cast(t, terms[0].dtype) for t in terms])

    def _add_terms(self, result: dict, terms: list[Term]) -> None:
        result["numerators"] = [t.numerator for t in terms]
        result["denominators"] = [t.denominator for t in terms]
        self.kinds = [t.kind for t in terms]

    def _penalties(self) -> list[tf.Tensor]:
        found = [
            (tf.reduce_sum(loss), layer.name)
            for layer in self._model._flatten_layers()
            for loss in layer._get_own_losses()
        ]
        self.added_by = [name for _, name in found]
        floatx = tf.as_dtype(keras.backend.floatx())
        return [loss if loss.dtype.is_floating else tf.cast(loss, floatx) for loss, _ in found]

    def _note_changes(self, scope: "_RecordingScope", before: dict) -> None:
        for variable in self.trainable:
            if id(variable) in scope.updated:
                raise ModelError(
                    f"The model {self._model.name!r} assigns its trainable weight {variable.path!r} during the forward "
                    "pass (as SpectralNormalization does), and then trains the new value. Towers share one copy of a "
                    "weight, which only the optimizer writes. Constrain it with kernel_constraint, or pass gpus=1."
                )
        known = {id(v) for v in (*self.trainable, *self.state, *self.tallies)}
        compiled = {id(v) for v in self._model.metrics_variables}
        unknown = [v for key, v in scope.updated.items() if key not in known]
        if any(id(v) not in compiled for v in unknown):
            raise UnknownState([v for v in unknown if id(v) not in compiled])
        for metric in self._own_metrics:
            touched = any(scope.state_mapping[id(v)] is not before[id(v)] for v in metric.variables)
            if touched and not is_additive(metric):
                raise ModelError(
                    f"The model {self._model.name!r} updates the metric {metric.name!r} "
                    f"({type(metric).__name__}) inside call(), on each tower for its own rows, and mgpu does not "
                    "know whether its state can be added up. If it is a sum over rows, declare it: "
                    "mgpu.additive(metric). Else pass it to compile(metrics=[...])."
                )
        self.changed_state = [i for i, v in enumerate(self.state) if scope.state_mapping[id(v)] is not before[id(v)]]


def cheaper(gradient: Any) -> Any:
    """Return sparse slices that outnumber the rows of their variable as one slice for each row.

    Looking up n rows of a table of R moves n rows back to the parameter device, with duplicates; a dense
    gradient moves R. The smaller of the two travels, and duplicates are summed by Keras' optimizer once.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)

    def dense() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows), tf.range(rows)

    values, indices = tf.cond(
        tf.size(gradient.indices, out_type=gradient.indices.dtype) > rows,
        dense,
        lambda: (gradient.values, gradient.indices),
    )
    values = tf.ensure_shape(values, gradient.values.shape)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


# What an empty tower computed from its stand-in row, by the name of the result: dropped, or left alone
# because its row count drops it later.
_DROPPED = ("numerators", "denominators", "penalties", "weight_penalties", "tallies", "trackers", "gradients")


def nothing_if_empty(result: dict, rows: tf.Tensor) -> dict:
    """Return what a tower of `rows` rows (a scalar) found, without what a stand-in row contributed."""
    dropped = {name: result[name] for name in _DROPPED if name in result}
    return {**result, **zeros_if_empty(dropped, rows)}


def zeros_if_empty(values: Any, rows: tf.Tensor) -> Any:
    """Return the nested `values`, or zeros in their place if `rows` is 0. Indices of slices stay.

    Not a product with 0: what the stand-in row gave may be NaN. In the usual case nothing is copied.
    """
    tensors = tf.nest.flatten(values)
    dense = [v.values if isinstance(v, tf.IndexedSlices) else v for v in tensors]
    given = [v for v in dense if v is not None]
    if not given:
        return values
    kept = tf.cond(
        rows > 0,
        lambda: [tf.identity(v) for v in given],
        lambda: [tf.zeros_like(v) for v in given],
    )
    rest = iter(tf.ensure_shape(k, v.shape) for k, v in zip(kept, given, strict=True))
    out = []
    for tensor in tensors:
        if isinstance(tensor, tf.IndexedSlices):
            out.append(tf.IndexedSlices(next(rest), tensor.indices, tensor.dense_shape))
        else:
            out.append(None if tensor is None else next(rest))
    return tf.nest.pack_sequence_as(values, out)


class _RecordingScope(keras.StatelessScope):
    """A StatelessScope that also remembers which variables were written."""

    def __init__(self, mapping: list) -> None:
        super().__init__(mapping, collect_losses=True)
        self.updated: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple) -> None:
        self.updated[id(update[0])] = update[0]
        super().add_update(update)


def _compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


def _own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics that layers hold, apart from what compile() made."""
    made = [model._loss_tracker, model._compile_metrics, *_compiled_metrics(model)]
    made += [] if model._compile_loss is None else model._compile_loss.metrics
    made_ids = {id(m) for m in made}
    return [m for m in model.metrics if id(m) not in made_ids]


def _specs(variables: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]
