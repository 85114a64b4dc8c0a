"""Towers traced side by side, for layers that need a sum over all towers in the middle of the forward pass.

`BatchNormalization(synchronized=True)` asks TensorFlow's replica context for the sum of its statistics. Here
each tower is traced by a thread of its own; only one runs at a time. A tower that asks for a sum hands over
to the next one; when the last has asked, the sums are made and each tower goes on with them. The towers end up
in one graph, so that gradients flow through the sums as they do on one device.

T = towers.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mgpu.errors import ModelError


def run_in_lockstep(towers: Sequence[str], call: Callable[[int], Any], rows: Sequence[tf.Tensor]) -> list[Any]:
    """Call `call(t)` for each tower under its device, exchanging sums where a layer asks for them.

    Args:
        towers: T device names.
        call: traces tower t in the current graph.
        rows: T scalar int64, the rows of each tower: what an empty tower contributes to a sum is dropped.

    Returns:
        T results.

    Raises:
        ModelError: the towers ask for different numbers of sums.
        Exception: what `call` raised, first tower first.
    """
    turns = _Turns(len(towers))
    graph = tf.compat.v1.get_default_graph()
    sums = _Sums(towers, rows, turns)
    threads = [_TowerThread(t, device, call, graph, sums, turns) for t, device in enumerate(towers)]
    graph.switch_to_thread_local()
    for thread in threads:
        thread.start()
    turns.begin()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.error is not None and not isinstance(thread.error, _Abandoned):
            raise thread.error
    return [thread.result for thread in threads]


class _Abandoned(Exception):
    """Another tower has failed: end this one."""


class _Turns:
    """Whose turn it is. Exactly one tower runs; the others wait."""

    def __init__(self, towers: int) -> None:
        self._changed = threading.Condition()
        self._current: int | None = None
        self._left = list(range(towers))
        self.failed = False

    def begin(self) -> None:
        with self._changed:
            self._current = self._left[0]
            self._changed.notify_all()

    def wait_for(self, tower: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == tower or self.failed)
            if self.failed:
                raise _Abandoned

    def hand_over(self, tower: int) -> None:
        """Let the next tower that has not ended run."""
        with self._changed:
            if self._left:
                later = [t for t in self._left if t > tower]
                self._current = later[0] if later else self._left[0]
            self._changed.notify_all()

    def end(self, tower: int, failed: bool) -> None:
        with self._changed:
            self._left.remove(tower)
            self.failed |= failed
        self.hand_over(tower)


class _Sums:
    """The sums over towers, one after the other: collects T summands, and makes the sum when all are there."""

    def __init__(self, towers: Sequence[str], rows: Sequence[tf.Tensor], turns: _Turns) -> None:
        self._towers = towers
        self._rows = rows
        self._turns = turns
        self._pending: dict[int, list[tf.Tensor]] = {}
        self._made: dict[int, list[tf.Tensor]] = {}

    def total(self, tower: int, values: list[tf.Tensor]) -> list[tf.Tensor]:
        self._pending[tower] = values
        if len(self._pending) == len(self._towers):
            self._make()
        self._turns.hand_over(tower)
        self._turns.wait_for(tower)
        if tower not in self._made:
            raise ModelError(
                f"Tower {tower} asked for a sum over {len(self._towers)} towers; another tower has ended without "
                "asking. A layer with synchronized=True probably runs on some towers only; call it for every batch."
            )
        return self._made.pop(tower)

    def _make(self) -> None:
        for t, values in self._pending.items():
            self._pending[t] = [
                tf.where(self._rows[t] > 0, v, tf.zeros_like(v)) for v in values
            ]  # an empty tower traced a stand-in row
        totals = [tf.add_n(list(summands)) for summands in zip(*self._pending.values(), strict=True)]
        self._made = {t: list(totals) for t in self._pending}
        self._pending = {}


class _TowerThread(threading.Thread):
    """Traces one tower into the graph of the thread that started it."""

    def __init__(
        self, tower: int, device: str, call: Callable[[int], Any], graph: tf.Graph, sums: _Sums, turns: _Turns
    ) -> None:
        super().__init__(name=f"mgpu-tower-{tower}", daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self._tower, self._device, self._call = tower, device, call
        self._graph, self._sums, self._turns = graph, sums, turns
        self._strategy = tf.distribute.get_strategy()

    def run(self) -> None:
        try:
            self._turns.wait_for(self._tower)
            context = _LockstepContext(self._strategy, self._tower, self._sums)
            with self._graph.as_default(), tf.device(self._device), context:
                self.result = self._call(self._tower)
        except BaseException as error:  # noqa: BLE001 handed to the thread that waits for this one
            self.error = error
        self._turns.end(self._tower, failed=self.error is not None)


class _LockstepContext(tf.distribute.ReplicaContext):
    """What a layer finds when it asks TensorFlow which replica it runs in."""

    def __init__(self, strategy: tf.distribute.Strategy, tower: int, sums: _Sums) -> None:
        super().__init__(strategy, replica_id_in_sync_group=0)
        self._tower = tower
        self._sums = sums

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        totals = self._sums.total(self._tower, flat)
        if str(reduce_op).endswith("MEAN"):
            totals = [t / len(self._sums._towers) for t in totals]
        return tf.nest.pack_sequence_as(value, totals)
