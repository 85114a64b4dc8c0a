"""Run on every rank: what a strategy gives back of an exchange, compared with NumPy's sums. Prints "exact" if right."""

import sys

import numpy as np
import tensorflow as tf

from mgpu.strategies.horovod import Horovod
from mgpu.strategies.mpi import MPI

KINDS = {"mpi": MPI, "horovod": Horovod}
SHAPES = [(3, 4), (5,), (), (7, 2)]


def values_of(rank):
    rng = np.random.default_rng(rank)
    dense = [rng.normal(size=shape).astype("float32") for shape in SHAPES]
    riders = [np.float32(rank + 0.5), np.int64(rank + 1), rng.normal(size=(2,))]
    # Rank r has r + 1 slices, two of them in the same row.
    indices = (np.arange(rank + 1) % 2 + rank).astype("int32")
    return dense, riders, rng.normal(size=(rank + 1, 2)).astype("float32"), indices


def main(kind, bucket_bytes, sparse_as_dense):
    sparse_as_dense = {"None": None, "True": True, "False": False}[sparse_as_dense]
    strategy = KINDS[kind](bucket_bytes=int(bucket_bytes), sparse_as_dense=sparse_as_dense)
    world = strategy.world
    every = [values_of(rank) for rank in range(world.size)]
    dense, riders, values, indices = every[world.rank]

    @tf.function
    def step(dense, riders, values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([9, 2], tf.int32))
        gradients, totals = strategy.exchange([*dense, None, slices], riders, tf.ones(()) / world.size)
        gathered = strategy.gather_over_ranks(values, "rows")
        (early,) = strategy.sum_over_ranks([tf.reduce_sum(values)], "early")
        return gradients[:-2], tf.convert_to_tensor(gradients[-1]), totals, gathered, early

    for _ in range(3):
        sums, table, totals, gathered, early = step(dense, riders, values, indices)
        for position, found in enumerate(sums):
            # Sums of a few float32 in two orders.
            np.testing.assert_allclose(found, sum(v[0][position] for v in every), rtol=1e-5, atol=1e-6)
        for position, found in enumerate(totals):
            np.testing.assert_allclose(found, sum(v[1][position] for v in every), rtol=1e-6)
        expected = np.zeros((9, 2), "float32")
        for _, _, rows, places in every:
            np.add.at(expected, places, rows)
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(gathered, np.concatenate([v[2] for v in every]))
        np.testing.assert_allclose(early, sum(v[2].sum() for v in every), rtol=1e-5, atol=1e-6)
    bits = [np.asarray(s).tobytes() for s in sums]
    if any(other != bits for other in world.gather(bits)):
        raise SystemExit("the ranks hold different bits")
    print(f"rank {world.rank} of {world.size}: exact")


main(*sys.argv[1:])
