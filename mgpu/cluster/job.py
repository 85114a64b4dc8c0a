"""Runs `mpirun` to its end: a log for each rank, signals passed on, no process left, a status that tells the truth."""

import contextlib
import ctypes
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from mgpu.cluster.mpi import Mpi
from mgpu.cluster.output import Splitter

# Ask mpirun to end the ranks; it waits 1 to 2 s for them itself.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# mpirun gives these to the ranks.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# After it was asked to end, mpirun has this long.
_END_S = 15.0
# After its end, what it left in the pipes has this long to be read.
_DRAIN_S = 2.0
_TRACEBACK = b"Traceback (most recent call last)"
_SIGNAL_REPORTS = (
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+signal (?P<number>\d+)"),
    re.compile(r"RUNNING AT (?P<host>\S+)[\s\S]*?EXIT STRING: .*\(signal (?P<number>\d+)\)"),
)
_EXIT_REPORT = re.compile(r"Process name: \[.*?,(?P<rank>\d+)\]\s+Exit code:\s+(?P<status>\d+)")
_ABORT_REPORT = re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)|Abort\(\d+\) on node \d+ \(rank (?P<node>\d+)")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        status: exit status for the shell: 0 only if every rank's was; 128 + the signal's number where a signal ended
            a rank or the job.
        cause: what ended first, in a sentence; "" for status 0.
        traceback: of the rank that failed first; "" where there is none.
    """

    status: int
    cause: str = ""
    traceback: str = ""


class Job:
    """One `mpirun` and what its ranks write.

    Args:
        command: the whole command line.
        mpirun: of which MPI it is.
        num_ranks: ranks it starts.
        logs: existing folder; gets rank-0.log and so on, and mpirun.log with what mpirun itself says.
        failures: folder where failing ranks leave their tracebacks.
        show: ranks whose output the terminal shows: "first" is rank 0's as it is, "all" leads each line by the rank.
    """

    def __init__(
        self, command: Sequence[str], mpirun: Mpi, *, num_ranks: int, logs: Path, failures: Path, show: str = "first"
    ) -> None:
        self._command = list(command)
        self._mpirun = mpirun
        self._show_all = show == "all"
        self._logs = logs
        self._failures = failures
        self._num_ranks = num_ranks
        self._files: dict[int | None, BinaryIO] = {}
        self._lines: dict[tuple[int, BinaryIO], bytes] = {}
        self._said = b""  # the end of what came on mpirun's standard error, where its reports are
        self._order: list[int] = []  # ranks in the order of their first traceback
        self._signal: int | None = None
        self._deadline_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, environ: Mapping[str, str]) -> Ended:
        """Start the command with the environment `environ`, and return when it and all it started have ended."""
        with contextlib.ExitStack() as stack:
            for rank in range(self._num_ranks):
                self._files[rank] = stack.enter_context((self._logs / f"rank-{rank}.log").open("wb"))
            self._files[None] = stack.enter_context((self._logs / "mpirun.log").open("wb"))
            stack.enter_context(self._handlers())
            # A session of its own: the terminal's Ctrl-C then comes here only, and is passed on once.
            process = subprocess.Popen(
                self._command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
            self._process = process
            if self._signal is not None:
                process.send_signal(self._signal)
            try:
                self._read(process)
            finally:
                process.kill()
                _kill_session(process.pid)
                status = process.wait()
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
        return self._ended(status)

    # ---- signals

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (*_ENDING, *_PASSED_ON)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        process = self._process
        if number in _ENDING:
            again, self._signal = self._signal is not None, number
            if process is not None and again and number == signal.SIGINT:
                process.kill()  # a second Ctrl-C is meant
                return
            self._deadline_s = time.monotonic() + _END_S
        if process is not None and process.poll() is None:
            process.send_signal(number)

    # ---- output

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        out, err = process.stdout, process.stderr
        if out is None or err is None:
            return
        kind, major = self._mpirun.kind, self._mpirun.major
        ended_s: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ, (Splitter(kind, major), sys.stdout.buffer))
            selector.register(err, selectors.EVENT_READ, (Splitter(kind, major), sys.stderr.buffer))
            while selector.get_map():
                for key, _ in selector.select(timeout=0.2):
                    splitter, terminal = key.data
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    if terminal is sys.stderr.buffer:
                        self._said = (self._said + data)[-32768:]
                    for rank, text in splitter.feed(data) if data else splitter.close():
                        self._write(rank, text, terminal)
                now = time.monotonic()
                if self._deadline_s is not None and now > self._deadline_s:
                    process.kill()
                if process.poll() is not None:
                    ended_s = now if ended_s is None else ended_s
                    # mpirun is gone; a rank that outlives it could hold the pipes open for ever.
                    if now - ended_s > _DRAIN_S:
                        return
        while process.poll() is None:
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                process.kill()
            time.sleep(0.02)
        for (rank, terminal), rest in self._lines.items():
            if rest:
                _show(terminal, f"[{rank}] ".encode() + rest + b"\n")

    def _write(self, rank: int | None, text: bytes, terminal: BinaryIO) -> None:
        file = self._files.get(rank, self._files[None])
        file.write(text)
        file.flush()
        if rank is not None and _TRACEBACK in text and rank not in self._order:
            self._order.append(rank)
        if rank is None:
            _show(sys.stderr.buffer, text)
        elif self._show_all:
            *lines, rest = (self._lines.get((rank, terminal), b"") + text).split(b"\n")
            self._lines[rank, terminal] = rest
            _show(terminal, b"".join(f"[{rank}] ".encode() + line + b"\n" for line in lines))
        elif rank == 0:
            _show(terminal, text)

    # ---- the end

    def _ended(self, status: int) -> Ended:
        said = self._said.decode(errors="replace")
        failures = sorted(self._failures.glob("*-rank*.txt"), key=lambda path: float(path.name.split("-")[0]))
        if status < 0:
            status = 128 - status  # mpirun itself was killed
        if self._signal is not None and status in (0, 1, self._signal):
            # mpirun's status after a signal: 1 by Open MPI, the signal's number by MPICH.
            status = 128 + self._signal
        killed = next(filter(None, (pattern.search(said) for pattern in _SIGNAL_REPORTS)), None)
        if killed and self._mpirun.kind != "Open MPI" and status == int(killed["number"]):
            status += 128
        if status == 0 and failures:
            status = 1
        if status == 0:
            return Ended(0)
        first_text = failures[0].read_text(encoding="utf-8", errors="replace") if failures else ""
        if self._signal is not None:
            return Ended(status, f"ended by {_name(self._signal)}, which this command received", first_text)
        if killed and (not failures or "RankError" in first_text):
            # The others only found out that this one had gone.
            rank = f"rank {killed['rank']}" if "rank" in killed.re.groupindex else "a rank"
            cause = f"{rank} on {killed['host']} was ended by {_name(int(killed['number']))}"
            if int(killed["number"]) == signal.SIGKILL:
                cause += "; where nobody sent it, the host was probably out of memory (look for 'oom' in dmesg)"
            return Ended(status, cause, first_text)
        if failures:
            return Ended(status, f"{_rank_of(failures[0])} failed first", first_text)
        # A script that failed before it made mgpu's world, or without one.
        exited, aborted = _EXIT_REPORT.search(said), _ABORT_REPORT.search(said)
        if exited:
            failed, cause = int(exited["rank"]), f"rank {exited['rank']} ended with status {exited['status']}"
        elif aborted:
            failed = int(aborted["rank"] or aborted["node"])
            cause = f"rank {failed} called MPI_Abort"
        elif self._order:
            failed, cause = self._order[0], f"rank {self._order[0]} failed first"
        else:
            return Ended(status, f"mpirun ended with status {status}")
        return Ended(status, cause, _last_traceback(self._logs / f"rank-{failed}.log"))


def _rank_of(path: Path) -> str:
    return "rank " + path.stem.rpartition("-rank")[2]


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _last_traceback(log: Path) -> str:
    data = log.read_bytes()[-65536:]
    start = data.rfind(_TRACEBACK)
    return data[start:].decode(errors="replace") if start >= 0 else ""


def _show(terminal: BinaryIO, text: bytes) -> None:
    # A reader that has left, as in `mgpu run ... | head`, is no reason to end the training.
    with contextlib.suppress(BrokenPipeError):
        terminal.write(text)
        terminal.flush()


def _end_with_parent() -> Callable[[], None] | None:
    """Return what the child calls to get SIGTERM when this process dies, even by SIGKILL (Linux only)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_session(session: int) -> None:
    """Kill what is left of `session` on this host: ranks that outlived an mpirun that was killed."""
    for _ in range(50):
        left = [pid for pid in map(int, filter(str.isdigit, _listed("/proc"))) if _session_of(pid) == session]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _session_of(pid: int) -> int | None:
    """Return the session of a living process; None for one that has ended or cannot be looked at."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, _, _, session = text.rpartition(")")[2].split()[:4]
    return None if state == "Z" else int(session)
