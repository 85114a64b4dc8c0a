"""The law: the number of towers, the batch size, the staging depth and the weights change no number.

A fixed sample runs each model; a drawn one looks for combinations that nobody thought of.
HYPOTHESIS_PROFILE=explore draws many more, at random, and shrinks what fails.
"""

import keras
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .harness import compare
from .models import MODELS

# batch_size, rows. Which wrong implementation fails:
BATCHES = {
    "even": (6, 12),
    "uneven": (5, 13),  # a mean of the towers' means; a cut that drops the remainder
    "last-of-one": (7, 15),  # a tower without rows: NaN * 0
    "tiny": (2, 5),  # fewer rows than towers, in every batch
}

# The models that go through every kind of batch: how many turns each. With 8, on 2 and 3 towers.
THOROUGH = {"dense": 8, "masked_steps": 4, "list_outputs": 4, "whole_batch_loss": 4}


def _fixed_sample():
    """Each model once, taking turns through batches, towers, depths and weights; some through all."""
    for turn, (name, spec) in enumerate(sorted(MODELS.items())):
        if not spec.available:
            continue
        turns = range(THOROUGH[name]) if name in THOROUGH else (turn,)
        for turn in turns:
            batch = list(BATCHES)[turn % 4]
            towers = min(spec.max_towers, 2 + (turn + turn // 4) % 2)
            depth = (1, 0, 4)[turn % 3]
            kind = spec.weights_kinds[turn % len(spec.weights_kinds)]
            yield pytest.param(
                name,
                batch,
                towers,
                depth,
                kind,
                turn % 3 == 0,
                id=f"{name}-{batch}-{towers}towers-depth{depth}-{kind}",
            )


@pytest.fixture(autouse=True)
def forget_models():
    """Free the traced functions of each test: there are hundreds of them."""
    yield
    keras.utils.clear_session()


@pytest.mark.parametrize(("name", "batch", "towers", "depth", "kind", "on_batch"), list(_fixed_sample()))
def test_parallel_model_gives_the_plain_models_numbers(name, batch, towers, depth, kind, on_batch):
    batch_size, rows = BATCHES[batch]
    compare(
        name,
        batch_size=batch_size,
        rows=rows,
        towers=towers,
        staging_depth=depth,
        weights_kind=kind,
        on_batch=on_batch,
    )


@st.composite
def combinations(draw):
    spec = MODELS[draw(st.sampled_from(sorted(n for n, spec in MODELS.items() if spec.available)))]
    return {
        "name": spec.name,
        "towers": draw(st.integers(1, spec.max_towers)),
        "batch_size": draw(st.integers(1, 9)),
        "rows": draw(st.integers(1, 17)),
        "staging_depth": draw(st.sampled_from([0, 1, 2, 4])),
        "weights_kind": draw(st.sampled_from(spec.weights_kinds)),
        "epochs": draw(st.integers(1, 2)),
        "on_batch": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def _drawing():
    """The profile of tests/conftest.py, but ten tries in CI: each one costs seconds, so none to shrink."""
    if settings.get_current_profile_name() == "ci":
        return settings(max_examples=10, phases=(Phase.explicit, Phase.generate))
    return settings()


@settings(parent=_drawing(), suppress_health_check=list(HealthCheck))
@given(combinations())
def test_parallel_model_gives_the_plain_models_numbers_when_drawn(combination):
    compare(**combination)
    keras.utils.clear_session()
