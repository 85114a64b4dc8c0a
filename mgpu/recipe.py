"""What a tower has to do for a model: how its losses and metrics are put together again, and what moves."""

import dataclasses

import keras

from mgpu.losses import flat_losses, is_marked_rowwise, is_rowwise
from mgpu.metrics import is_additive


@dataclasses.dataclass
class Recipe:
    """What a tower has to do in one mode, and what was found out about the model on the way.

    Attributes:
        mode: "train", "test" or "predict".
        loss_scope: "cut" (losses as sums over rows), "gather" (the outputs leave the tower, the loss is
            computed elsewhere) or "tower" (the model's own compute_loss on the part).
        tally_metrics: whether the tower updates the compiled metrics for its part.
        return_outputs: whether the model's outputs leave the tower.
        totals_first: whether denominators are known only after all forward passes.
        penalty_kinds: for each loss that layers add, "mean" (weighs by rows) or "sum" (adds up); None until
            it is known.
        extra_state: variables that the model changes but does not own, such as Keras' global seed.
    """

    mode: str
    loss_scope: str = "cut"
    tally_metrics: bool = True
    return_outputs: bool = False
    totals_first: bool = False
    penalty_kinds: list[str] | None = None
    extra_state: list[keras.Variable] = dataclasses.field(default_factory=list)


class Discovery(Exception):
    """Raised while tracing when the recipe must change; the caller changes it and traces again."""


class TotalsFirst(Discovery):
    """A denominator depends on the data, so the forward passes must end before the backward passes begin."""


class UnknownState(Discovery):
    """The model changed variables that it does not own."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        super().__init__(variables)
        self.variables = variables


class UnknownPenalties(Discovery):
    """Layers add losses of which it is not known yet whether they are means or sums over rows."""


def first_recipe(model: keras.Model, mode: str, loss_scope: str) -> Recipe:
    """Return what a tower has to do, as far as the model and how it was compiled tell."""
    if mode == "predict":
        return Recipe(mode, tally_metrics=False, return_outputs=True)
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if loss_scope == "batch":
        scope = "gather"
    elif own_loss:
        scope = "tower" if loss_scope == "tower" or is_marked_rowwise(type(model).compute_loss) else "gather"
    elif loss_scope == "tower":
        scope = "cut" if all(map(is_rowwise, flat_losses(model._compile_loss))) else "tower"
    else:
        scope = "cut" if all(map(is_rowwise, flat_losses(model._compile_loss))) else "gather"
    compiled = [] if model._compile_metrics is None else model._compile_metrics.metrics
    tally = type(model).compute_metrics is keras.Model.compute_metrics and all(map(is_additive, compiled))
    return Recipe(mode, loss_scope=scope, tally_metrics=tally, return_outputs=scope == "gather" or not tally)
