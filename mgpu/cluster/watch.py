"""Finds out that a rank has left or does not come, and ends the job with a report instead of a silent wait.

A thread of each rank looks four times a second. It exchanges three kinds of messages with the others' threads:
"left" (this rank is about to exit), "stalled" (this rank has waited too long, and asks who else waits) and
"waiting" (the answer).
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from mgpu.errors import RankError

_LEFT, _STALLED, _WAITING = 1, 2, 3
_PERIOD_S = 0.25
# How long a rank may wait for one that has left, before that counts as an error: its last message may be on its way.
_LEFT_GRACE_S = 1.0
# How long the answers to "who else waits?" may take.
_ANSWER_S = 2.0
# How long the main thread has to raise the error itself, before this thread reports it and ends the job.
_RAISE_S = 4.0
# Where `mgpu run` wants the tracebacks of failed ranks.
FAILURES = "MGPU_FAILURES"


class Watch:
    """Looks after the ranks of one job. `start` also takes over how uncaught exceptions and exits end it."""

    def __init__(self, comm: Any, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._comm = comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._doing: dict[int, tuple[str, float]] = {}
        self._next_key = 0
        self._lock = threading.Lock()
        self._failure: RankError | None = None
        self._failed_at = 0.0
        self._left: dict[int, str] = {}
        self._waiting: dict[int, str] = {}
        self._asked_at: float | None = None
        self._ending = False
        self._sent: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="mgpu-watch", daemon=True)

    def start(self) -> None:
        """Begin to look, and let no rank end without the others knowing."""
        self._thread.start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._on_exit)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what this rank does that other ranks take part in."""
        with self._lock:
            key = self._next_key
            self._next_key += 1
            self._doing[key] = (what, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._doing.pop(key, None)

    def check(self) -> None:
        """Raise the failure that was found, if one was."""
        if self._failure is not None:
            raise self._failure

    # ---- the thread

    def _run(self) -> None:
        while not self._ending:
            time.sleep(_PERIOD_S)
            try:
                self._receive()
                if self._failure is None:
                    self._look()
                elif time.monotonic() - self._failed_at > _RAISE_S and self._current() is not None:
                    # The main thread is inside a call that cannot be interrupted.
                    self.end_job(self._failure)
            except Exception:  # noqa: BLE001 a thread's error reaches nobody: print it, and go on looking
                traceback.print_exc()
                return

    def _current(self) -> tuple[str, float] | None:
        """Return what this rank is in, outermost first, and since when."""
        with self._lock:
            if not self._doing:
                return None
            entries = list(self._doing.values())
        return ", ".join(what for what, _ in entries), entries[0][1]

    def _look(self) -> None:
        current = self._current()
        if current is None:
            self._asked_at = None
            return
        what, since = current
        now = time.monotonic()
        if self._left and now - since > _LEFT_GRACE_S:
            gone = ", ".join(f"rank {rank} ({said})" for rank, said in sorted(self._left.items()))
            self._fail(
                f"Rank {self._rank} is in {what}, which needs all {self._size} ranks; {gone} has left the job. It "
                "probably ended early or took another way through the script: every rank must make the same calls of "
                "fit, evaluate and predict. Look at the end of that rank's output."
            )
        elif self._asked_at is None and now - since > self.timeout_s:
            self._asked_at = now
            self._waiting = {}
            self._send_all(_STALLED, what)
        elif self._asked_at is not None and now - self._asked_at > _ANSWER_S:
            missing = [r for r in range(self._size) if r != self._rank and r not in self._waiting]
            others = "; ".join(f"rank {r} waits in {said}" for r, said in sorted(self._waiting.items()))
            awaited = (
                f"no sign of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                if missing
                else ("every rank waits, each for something else")
            )
            self._fail(
                f"Rank {self._rank} has waited {now - since:.0f} s in {what} (timeout_s={self.timeout_s:g}): {awaited}"
                f"{'; ' + others if others else ''}. A rank that computes or reads for longer than that, one that was "
                "stopped, or a script in which ranks take different ways is the usual cause. If the work really takes "
                f"that long, pass make_parallel(timeout_s={2 * self.timeout_s:g})."
            )

    def _fail(self, message: str) -> None:
        self._failed_at = time.monotonic()
        self._failure = RankError(message)

    def _receive(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, tag = status.Get_source(), status.Get_tag()
            said = self._comm.recv(source=source, tag=tag)
            if tag == _LEFT:
                self._left[source] = said
            else:
                self._waiting[source] = said
                current = self._current()
                if tag == _STALLED and current is not None:
                    self._sent.append(self._comm.isend(current[0], dest=source, tag=_WAITING))

    def _send_all(self, tag: int, text: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._sent.append(self._comm.isend(text, dest=rank, tag=tag))

    # ---- the end of this rank

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.end_job(error)

    def end_job(self, error: BaseException) -> None:
        """Print `error` with this rank's number and end all ranks. Does not return."""
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = f"mgpu: rank {self._rank} of {self._size} on {socket.gethostname()} failed; the job ends.\n{lines}"
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        folder = os.environ.get(FAILURES)
        if folder:
            with contextlib.suppress(OSError):
                Path(folder, f"{time.time():.6f}-rank{self._rank}.txt").write_text(text, encoding="utf-8")
        time.sleep(0.2)  # lets the launcher forward what was printed before it kills this process
        self._comm.Abort(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _on_exit(self) -> None:
        """Tell the others that this rank leaves, and wait for them: MPI may only be ended by all together."""
        self._send_all(_LEFT, "it came to the end of its script, or called sys.exit()")
        leaving = self._comm.Ibarrier()
        while not leaving.Test():
            time.sleep(0.01)
        self._ending = True
        self._thread.join(timeout=2 * _PERIOD_S)
