"""How batches get from Keras' epoch iterator into the towers: fill, steady, drain, keep, clear.

Keras hands each epoch's iterator to the train, test or predict function. With staging, that iterator runs
`depth` batches ahead of the step:

    fill    before the first step, until `depth` batches are staged or the source ends
    steady  each step trains on the oldest staged batch and, meanwhile, stages the next one
    drain   once the source has ended (or failed), steps go on until nothing is staged
    keep    when `steps_per_epoch` cuts an endless dataset, what is staged waits for the next epoch
    clear   when the data changes, and whenever fit, evaluate or predict ends, however it ends

T = towers, B = rows in a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mgpu.data.split import Layout, cut, layout_of, num_rows
from mgpu.errors import StagingError
from mgpu.staging import StagingArea

HOST = "/CPU:0"


def traced(function: Callable, signature: list, eager: bool) -> Callable:
    """Return `function`, traced when it is first called; or as it is, if `eager`.

    The concrete function is called and not the tf.function, which warns of retracing as soon as a few lanes
    of several models have each traced their own.
    """
    if eager:
        return function
    made = tf.function(function, input_signature=signature, autograph=False)
    concrete: list[Callable] = []

    def call(*args: Any) -> Any:
        if not concrete:
            concrete.append(made.get_concrete_function())
        return concrete[0](*args)

    return call


def traced_by_source(function: Callable, signature: list, eager: bool) -> Callable:
    """As `traced`, for a function whose first argument is an iterator of a dataset."""
    by_spec: list[tuple[Any, Callable]] = []

    def call(source: Any, *args: Any) -> Any:
        for spec, known in by_spec:
            if spec == source.element_spec:
                return known(source, *args)
        source_spec = tf.data.IteratorSpec(source.element_spec)
        by_spec.append((source.element_spec, traced(function, [source_spec, *signature], eager)))
        return by_spec[-1][1](source, *args)

    return call


class Lane:
    """The staging areas and traced functions of one mode ("train", "test", "predict") and batch layout.

    Args:
        step: has `run(rows, parts, ready)` and `prepare(sample)`.
        layout: of the batches.
        towers: T device names, one staging area on each.
        depth: batches staged ahead, 0 for none.
        steps_per_execution: steps in one call.
        eager: run everything untraced.
        announce: told once, before the first step, the rows of the first batch (None without staging).
    """

    def __init__(
        self,
        step: Any,
        layout: Layout,
        *,
        towers: Sequence[str],
        depth: int,
        steps_per_execution: int,
        eager: bool,
        announce: Callable[[int | None], None],
    ) -> None:
        self._announce = announce
        self.layout = layout
        self.depth = depth
        self.steps_per_call = steps_per_execution
        self.owner: StagedIterator | None = None
        self._step = step
        self._towers = towers
        self._prepared = False
        # One more than `depth`: while a step works on the oldest batch, it is still in its area.
        specs = list(layout.specs)
        self.areas = [StagingArea(specs, device, depth + 1) for device in towers] if depth else []
        self._rows = StagingArea(tf.TensorSpec((), tf.int64), HOST, depth + 1)

        rows, count = tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.int32)
        self._compute = traced(step.run, [rows, [specs] * len(towers), count], eager)
        self.on_tensors = traced(self._on_tensors, [specs], eager)
        self.drain = traced(self._drain, [count], eager)
        # These take the source, and are traced once for each kind of source.
        self.put_next = traced_by_source(self._put_next, [], eager)
        self.steady = traced_by_source(self._steady, [count], eager)
        self.direct = traced_by_source(self._direct, [], eager)

    # ---- outside the graph

    def prepare(self, sample: Callable[[], Sequence[Any]] | None = None) -> None:
        """Let the step find out what it must know before it is traced, and say what will be done, once.

        Args:
            sample: returns the tensors of a batch; the default looks at what is staged.
        """
        if not self._prepared:
            self._step.prepare(sample or self._staged_sample)
            self._prepared = True
            self._announce(self.next_rows())

    def clear(self) -> None:
        """Drop what is staged."""
        if self.owner is None:
            return
        self.owner = None
        for area in self._all_areas():
            area.clear()

    def close(self) -> None:
        """Give the areas back."""
        for area in self._all_areas():
            area.close()

    def _all_areas(self) -> list[StagingArea]:
        return [*self.areas, self._rows]

    def next_rows(self) -> int | None:
        """Return the rows of the batch that is staged first, or None where nothing is."""
        return int(self._rows.peek_now()) if self.depth and self.owner is not None else None

    def _staged_sample(self) -> Sequence[Any]:
        return self.areas[-1].peek_now()

    # ---- inside the graph

    def _on_tensors(self, tensors: list) -> Any:
        return self._compute(num_rows(tensors), cut(tensors, len(self._towers)), tf.zeros((), tf.int32))

    def _put_next(self, iterator: Any) -> tf.Tensor:
        """Stage the next batch of the source. Returns 1, or 0 if the source has ended (int32)."""
        upcoming = iterator.get_next_as_optional()
        with tf.device(HOST):
            return tf.cond(
                upcoming.has_value(), lambda: self._put(upcoming.get_value()), lambda: tf.zeros((), tf.int32)
            )

    def _put(self, batch: Any) -> tf.Tensor:
        tensors = self.layout.flatten(batch)
        done = [self._rows.put_now(num_rows(tensors))]
        for area, part in zip(self.areas, cut(tensors, len(self._towers)), strict=True):
            done.append(area.put_now(part))
        with tf.control_dependencies([op for op in done if op is not None]):
            return tf.ones((), tf.int32)

    def _steady(self, iterator: Any, staged: tf.Tensor) -> tuple[Any, tf.Tensor]:
        return self._repeat(staged, lambda: self._put_next(iterator))

    def _drain(self, staged: tf.Tensor) -> tuple[Any, tf.Tensor]:
        return self._repeat(staged, lambda: tf.zeros((), tf.int32))

    def _repeat(self, staged: tf.Tensor, put_next: Callable[[], tf.Tensor]) -> tuple[Any, tf.Tensor]:
        """Run steps while batches are staged, at most `steps_per_execution` and at least one.

        Returns:
            The results of the last step, and how many batches are staged now (int32).
        """
        logs, staged = self._one(staged, put_next)
        if self.steps_per_call == 1:
            return logs, staged
        _, logs, staged = tf.while_loop(
            lambda i, logs, staged: (i < self.steps_per_call) & (staged > 0),
            lambda i, logs, staged: (i + 1, *self._one(staged, put_next)),
            (tf.ones((), tf.int32), logs, staged),
            parallel_iterations=1,
        )
        return logs, staged

    def _one(self, staged: tf.Tensor, put_next: Callable[[], tf.Tensor]) -> tuple[Any, tf.Tensor]:
        with tf.control_dependencies([staged]):
            rows = self._rows.peek_now()
            parts = [area.peek_now() for area in self.areas]
        # Neither waits for the other: the next batch is read and copied while this one is worked on. What
        # the step writes does wait (`ready`), and only then is the batch taken out. So if the source fails,
        # nothing has happened, and the step can be done again without it.
        added = put_next()
        logs = self._compute(rows, parts, added)
        with tf.control_dependencies(tf.nest.flatten((logs, added), expand_composites=True)):
            taken = [area.get_now() for area in self._all_areas()]
        with tf.control_dependencies(tf.nest.flatten(taken, expand_composites=True)):
            return logs, staged - 1 + added

    def _direct(self, iterator: Any) -> Any:
        """Without staging: run up to `steps_per_execution` steps on what the source yields now."""
        logs = self._on_tensors(self.layout.flatten(iterator.get_next()))
        if self.steps_per_call == 1:
            return logs

        def body(i: tf.Tensor, more: tf.Tensor, logs: Any) -> tuple:
            upcoming = iterator.get_next_as_optional()
            more = upcoming.has_value()
            logs = tf.cond(
                more,
                lambda: self._on_tensors(self.layout.flatten(upcoming.get_value())),
                lambda: logs,
            )
            return i + 1, more, logs

        return tf.while_loop(
            lambda i, more, logs: (i < self.steps_per_call) & more,
            body,
            (tf.ones((), tf.int32), tf.constant(True), logs),
            parallel_iterations=1,
        )[2]


class Lanes:
    """The lanes of one mode: one for each layout of batches, made when first needed."""

    def __init__(self, make_lane: Callable[[Layout], Lane]) -> None:
        self._make = make_lane
        self._lanes: dict[tuple, Lane] = {}

    def of(self, layout: Layout) -> Lane:
        """Return the lane for batches of `layout`."""
        if layout.key not in self._lanes:
            self._lanes[layout.key] = self._make(layout)
        return self._lanes[layout.key]

    def all(self) -> list[Lane]:
        """Return the lanes made so far."""
        return list(self._lanes.values())

    def clear(self) -> None:
        """Drop what is staged for this mode."""
        for lane in self.all():
            lane.clear()

    def run(self, data: Any) -> Any:
        """Run one call of Keras' train or test function: the next steps of `data`.

        Args:
            data: a `StagedIterator`, or any iterator of batches (train_on_batch sends one with one batch).

        Raises:
            StopIteration: the source has ended.
        """
        if isinstance(data, StagedIterator):
            return data.step(self)
        return self.on_batch(next(data))

    def on_batch(self, batch: Any) -> Any:
        """Run one step on `batch`, without staging."""
        batch = tf.nest.map_structure(_as_tensor, batch)
        layout = layout_of(batch)
        lane = self.of(layout)
        tensors = layout.flatten(batch)
        lane.prepare(lambda: tensors)
        return lane.on_tensors(tensors)


class StagedDataset:
    """What Keras iterates over in the place of the dataset: its iterators stage batches ahead."""

    def __init__(self, dataset: tf.data.Dataset, predict: Callable[[], Lanes]) -> None:
        self._dataset = dataset
        self._predict = predict

    def __iter__(self) -> "StagedIterator":
        return StagedIterator(iter(self._dataset), self._predict)


class StagedIterator(Iterator):
    """The batches of one pass over a dataset, staged ahead of the steps that use them."""

    def __init__(self, source: Any, predict: Callable[[], Lanes]) -> None:
        self._source = source
        self._predict = predict
        self._layout = layout_of(source.element_spec)
        self._lane: Lane | None = None
        self._staged = 0
        self._promised = 0
        self._error: Exception | None = None

    def step(self, lanes: Lanes) -> Any:
        """Run the next steps on the lane of `lanes` that fits.

        Raises:
            StopIteration: the source has ended and nothing is staged.
            Exception: what the source raised, once the batches before it have been used.
        """
        lane = self._attach(lanes)
        if not lane.depth:
            return self._unstaged_step(lane)
        self._fill(lane)
        if self._staged == 0:
            raise self._error or StopIteration
        lane.prepare()
        if self._error is None:
            try:
                logs, staged = lane.steady(self._source, tf.constant(self._staged))
            except tf.errors.OpError as error:
                failure = error
            else:
                self._staged = int(staged)
                return logs
            # If the step itself is at fault, doing it again without the source raises the same error.
            logs, staged = lane.drain(tf.constant(self._staged))
            self._error = failure
        else:
            logs, staged = lane.drain(tf.constant(self._staged))
        self._staged = int(staged)
        return logs

    def __next__(self) -> Any:
        """Return a ticket for the next batch: Keras' predict asks for batches before it hands them over."""
        lane = self._attach(self._predict())
        if not lane.depth:
            return next(self._source)
        self._fill(lane, self._promised + 1)
        if self._staged <= self._promised:
            raise self._error or StopIteration
        self._promised += 1
        return Ticket(self)

    def redeem(self) -> Any:
        """Run one step for a ticket."""
        self._promised -= 1
        return self.step(self._predict())

    def _attach(self, lanes: Lanes) -> Lane:
        if self._lane is None:
            self._lane = lanes.of(self._layout)
            lanes.clear()
            self._lane.owner = self
        elif self._lane.owner is not self and self._lane.depth:
            raise StagingError(
                "The next batch was asked for; its staging area now holds batches of another dataset. Probably a "
                "callback called fit, evaluate or predict inside a call of the same kind. Call it after that one, "
                "or on a model made by a second make_parallel()."
            )
        return self._lane

    def _fill(self, lane: Lane, at_least: int = 1) -> None:
        wanted = max(at_least, 1 if self._staged else lane.depth)
        while self._staged < wanted and self._error is None:
            try:
                added = int(lane.put_next(self._source))
            except tf.errors.OpError as error:
                self._error = error
                return
            if not added:
                return
            self._staged += added

    def _unstaged_step(self, lane: Lane) -> Any:
        looked_at: list = []

        def sample() -> Sequence[Any]:
            looked_at.append(lane.layout.flatten(next(self._source)))
            return looked_at[0]

        lane.prepare(sample)
        if not looked_at:
            return lane.direct(self._source)
        logs = lane.on_tensors(looked_at[0])
        for _ in range(lane.steps_per_call - 1):
            try:
                logs = lane.on_tensors(lane.layout.flatten(next(self._source)))
            except StopIteration:
                break
        return logs


class Ticket:
    """Stands for one staged batch."""

    def __init__(self, iterator: StagedIterator) -> None:
        self._iterator = iterator

    def redeem(self) -> Any:
        return self._iterator.redeem()


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)
