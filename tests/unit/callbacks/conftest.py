"""A job of several ranks, seen from one of them: what the others send is what the test says."""

import pytest

from mgpu.cluster import world as cluster


class FakeWorld(cluster.Alone):
    def __init__(self, rank=0, size=1, broadcasts=None, others=()):
        super().__init__()
        self.rank, self.size = rank, size
        self.broadcasts, self.others = broadcasts, list(others)

    def broadcast(self, value, root=0, what="a value"):
        if self.rank == root:
            self.broadcasts = value
        return self.broadcasts

    def gather(self, value, what="values"):
        gathered = list(self.others)
        gathered.insert(self.rank, value)
        return gathered


@pytest.fixture
def ranks(monkeypatch):
    """Return a function that makes this process rank `rank` of `size`."""

    def become(rank, size, **more):
        fake = FakeWorld(rank, size, **more)
        monkeypatch.setattr(cluster, "_world", fake)
        return fake

    become(0, 1)
    return become
