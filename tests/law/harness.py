"""Trains a plain model and its parallel twin on the same rows and compares all that a user can see.

The reference is Keras itself on one device, never mgpu's own output.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from mgpu import make_parallel

from .models import MODELS, Built, LawModel

Arrays = Any  # a nest of arrays, or None


def compare(
    name: str,
    *,
    batch_size: int,
    rows: int,
    towers: int,
    staging_depth: int = 1,
    weights_kind: str = "none",
    epochs: int = 2,
    on_batch: bool = True,
    seed: int = 0,
) -> None:
    """Check that the parallel twin of law model `name` gives the plain model's numbers.

    Compares, in this order: the logs of every epoch of `fit` with validation, all weights, the
    optimizer's variables, `evaluate`, `predict`; then, with `on_batch` (each is traced anew, which
    takes a second), `train_on_batch` and `test_on_batch` on 5 rows, and all weights once more.

    Raises:
        AssertionError: they differ; the text lists each quantity with its largest difference.
    """
    spec = MODELS[name]
    plain, twin, parallel = twins(spec, towers=towers, staging_depth=staging_depth, seed=seed)
    rng = np.random.default_rng(seed)
    x, y = plain.data(rows, rng)
    weights = draw_weights(spec, weights_kind, y, rows, rng)
    num_val = rows // 2 + 1
    x_val, y_val = plain.data(num_val, rng)
    validation = (x_val, y_val)
    if "sample_weight" in weights:
        validation += (draw_weights(spec, weights_kind, y_val, num_val, rng)["sample_weight"],)

    differences = _Differences(spec)
    history = {}
    for model in (plain.model, parallel):
        history[model] = model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=False,
            validation_data=validation,
            verbose=0,
            **weights,
        ).history
    differences.add_logs("fit", history[plain.model], history[parallel])
    differences.add_state("after fit", plain.model, twin.model, parallel)

    weights.pop("class_weight", None)  # only training takes it
    differences.add_logs(
        "evaluate",
        *(
            model.evaluate(x, y, batch_size=batch_size, return_dict=True, verbose=0, **weights)
            for model in (plain.model, parallel)
        ),
    )
    differences.add_nest(
        "predict",
        *(model.predict(x_val, batch_size=batch_size, verbose=0) for model in (plain.model, parallel)),
    )

    if on_batch:
        # Keras 3.6 does not reset the trackers of each output's loss between calls, and weighs them by the
        # batch size where that is static: what they carry over then depends on how a batch was traced.
        for model in (plain.model, parallel):
            for tracker in getattr(model._compile_loss, "metrics", ()):
                tracker.reset_state()
        x_odd, y_odd = plain.data(5, rng)
        for call in ("train_on_batch", "test_on_batch"):
            differences.add_logs(
                call,
                *(getattr(model, call)(x_odd, y_odd, return_dict=True) for model in (plain.model, parallel)),
            )
        differences.add_state("after train_on_batch", plain.model, twin.model, parallel)
    differences.raise_if_any()


def twins(spec: LawModel, *, towers: int, staging_depth: int = 1, seed: int = 0) -> tuple[Built, Built, keras.Model]:
    """Return the plain model, its twin, and the parallel model of the twin; all compiled alike.

    Each is built under the same seed: a model that is not built before its first batch has no
    weights to copy yet, but its initializers hold the same seeds.
    """
    built = []
    for _ in range(2):
        keras.utils.set_random_seed(seed)
        built.append(spec.build())
    plain, twin = built
    if plain.model.built and twin.model.built:
        twin.model.set_weights(plain.model.get_weights())
    parallel = make_parallel(
        twin.model,
        gpus=[f"/CPU:{tower}" for tower in range(towers)],
        staging_depth=staging_depth,
        **dict(spec.parallel_args),
    )
    # XLA would fuse the two models' sums differently, and compiles each shape anew.
    plain.model.compile(jit_compile=False, **plain.compile_args())
    parallel.compile(jit_compile=False, **twin.compile_args())
    return plain, twin, parallel


def draw_weights(spec: LawModel, kind: str, y: Arrays, rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the arguments for `fit` that carry weights of this kind; about a third are zero."""
    if kind not in spec.weights_kinds:
        raise ValueError(f"{spec.name} takes weights {spec.weights_kinds}, not {kind!r}")

    def draw(*shape: int) -> np.ndarray:
        weights = rng.choice([0.0, 0.5, 1.0, 2.5], size=shape, p=[0.3, 0.2, 0.3, 0.2])
        return weights.astype("float32")

    if kind == "rows":
        weights = draw(rows)
        weights[: rows // 4] = 0  # for small batches, a whole tower's part
        return {"sample_weight": weights}
    if kind == "steps":
        return {"sample_weight": draw(rows, spec.steps)}
    if kind == "outputs":
        return {"sample_weight": keras.tree.map_structure(lambda _: draw(rows), y)}
    if kind == "class":
        return {"class_weight": {label: 0.5 + 2.0 * label for label in range(spec.num_classes)}}
    return {}


class _Differences:
    """Collects what differs, so that one run tells all of it."""

    def __init__(self, spec: LawModel) -> None:
        self._spec = spec
        self._lines: list[str] = []

    def add(self, what: str, expected: Any, got: Any) -> None:
        expected, got = np.asarray(expected), np.asarray(got)
        if expected.shape != got.shape:
            self._lines.append(f"{what}: shape {expected.shape} plain, {got.shape} parallel")
            return
        tolerances = {"rtol": self._spec.rtol, "atol": self._spec.atol, "equal_nan": True}
        if not np.allclose(got, expected, **tolerances):
            worst = np.argmax(np.abs(got.astype("float64") - expected))
            self._lines.append(
                f"{what}: {expected.flat[worst]!r} plain, {got.flat[worst]!r} parallel"
                + (f" (worst of {expected.size})" if expected.size > 1 else "")
            )

    def add_logs(self, call: str, expected: dict[str, Any], got: dict[str, Any]) -> None:
        if list(expected) != list(got):
            self._lines.append(f"{call}: logs {list(expected)} plain, {list(got)} parallel")
        for key in expected.keys() & got.keys():
            self.add(f"{call}: {key}", expected[key], got[key])

    def add_nest(self, what: str, expected: Arrays, got: Arrays) -> None:
        keras.tree.assert_same_structure(expected, got)
        for index, (a, b) in enumerate(zip(keras.tree.flatten(expected), keras.tree.flatten(got), strict=True)):
            self.add(f"{what}[{index}]", a, b)

    def add_state(self, when: str, plain: keras.Model, twin: keras.Model, parallel: keras.Model) -> None:
        self._add_variables(f"{when}: weight", plain.weights, twin.weights)
        self._add_variables(f"{when}: parallel model's weight", plain.weights, parallel.weights)
        self._add_variables(f"{when}: optimizer", plain.optimizer.variables, parallel.optimizer.variables)

    def _add_variables(self, what: str, expected: Iterable[Any], got: Iterable[Any]) -> None:
        expected, got = list(expected), list(got)
        if len(expected) != len(got):
            self._lines.append(f"{what}s: {len(expected)} plain, {len(got)} parallel")
            return
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            self.add(
                f"{what} {index} {a.path}",
                keras.ops.convert_to_numpy(a),
                keras.ops.convert_to_numpy(b),
            )

    def raise_if_any(self) -> None:
        if self._lines:
            raise AssertionError(
                f"{self._spec.name} differs from the plain model "
                f"(rtol {self._spec.rtol}, atol {self._spec.atol}):\n" + "\n".join(self._lines)
            )
