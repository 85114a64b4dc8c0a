"""The one timing loop of all benchmarks: candidates take turns, and a busy machine is not timed.

R = rounds. In a round each candidate runs once, so what slows the machine for a while slows all of them, and
the ratio of two candidates within a round is steadier than either rate.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

LEAST_SHARE = 0.95
BUSY_STATUS = 3

_SPIN = """
import os, sys, time
core, start, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
while time.time() < start:
    pass
wall, cpu = time.perf_counter(), time.process_time()
while time.perf_counter() - wall < seconds:
    pass
print((time.process_time() - cpu) / (time.perf_counter() - wall))
"""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles of R numbers."""

    median: float
    low: float
    high: float
    num_rounds: int

    def text(self, digits: int = 2) -> str:
        """Return "median (lower quartile to upper quartile)"."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median of `values`, and the quartiles that lie within their range.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("spread() needs at least one value; it got none. Run at least one round.")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours[r] / theirs[r] for each round r.

    Raises:
        ValueError: they are not of the same rounds.
    """
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def take_turns(
    candidates: Mapping[str, Callable[[], float]],
    *,
    num_rounds: int,
    budget_s: float = float("inf"),
    least_rounds: int = 3,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run the candidates in turn, round after round, every second round in reverse order.

    Args:
        candidates: name -> a function that works for a while and returns a measurement, such as rows/s.
        num_rounds: R, most rounds.
        budget_s: seconds for everything, warm-up included. No round starts that would probably pass it...
        least_rounds: ...once this many are done.
        warm_up: whether a round before the first is run and dropped.
        clock: returns seconds.

    Returns:
        name -> R measurements; `result[a][r]` and `result[b][r]` are of one round.
    """
    start_s = clock()
    if warm_up:
        for run in candidates.values():
            run()
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    order, longest_s = list(candidates), 0.0
    for done in range(num_rounds):
        began_s = clock()
        if done >= least_rounds and began_s - start_s + longest_s > budget_s:
            break
        for name in order if done % 2 == 0 else reversed(order):
            measured[name].append(candidates[name]())
        longest_s = max(longest_s, clock() - began_s)
    return measured


def core_shares(seconds: float = 1.0) -> list[float]:
    """Return the share of each core's time that a process gets that wants all of it, on all cores at once."""
    start = time.time() + 0.3  # until all have started
    cores = sorted(os.sched_getaffinity(0))
    spins = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SPIN, str(core), str(start), str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in cores
    ]
    return [float(spin.communicate()[0]) for spin in spins]


def busy_reason(shares: Sequence[float]) -> str | None:
    """Return why a machine with these `core_shares` cannot be timed, or None if it can."""
    busy = [f"core {i}: {share:.2f}" for i, share in enumerate(shares) if share < LEAST_SHARE]
    if not busy:
        return None
    return (
        f"a process that wants a whole core gets less than {LEAST_SHARE} of it ({', '.join(busy)}): "
        "other processes are running"
    )


def refuse_when_busy(
    *, allow_busy: bool, measure: Callable[[], Sequence[float]] = core_shares, when: str = "before the run"
) -> str | None:
    """Exit with `BUSY_STATUS` when the machine is busy.

    Args:
        allow_busy: return the reason and don't exit.
        measure: returns the share of each core.
        when: for the message.

    Returns:
        None on a quiet machine, else why the results are unreliable.

    Raises:
        SystemExit: the machine is busy, and that is not allowed.
    """
    reason = busy_reason(measure())
    if reason is None:
        return None
    reason = f"{when}, {reason}"
    if allow_busy:
        return reason
    print(
        f"Not timed: {reason}. Stop them and run this again, or pass --allow-busy to see unreliable numbers.",
        file=sys.stderr,
    )
    raise SystemExit(BUSY_STATUS)
