"""Waits for SIGUSR1 on every rank, says so, and ends with status 75 by rank 0; or ends badly, as its argument says."""

import os
import signal
import sys
import threading
import time

from mpi4py import MPI

rank = MPI.COMM_WORLD.Get_rank()
saved = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: saved.set())
MPI.COMM_WORLD.Barrier()
if sys.argv[1] == "killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
print(f"rank {rank} is ready", flush=True)
while not saved.is_set():
    time.sleep(0.05)
print(f"rank {rank} saves", flush=True)
MPI.COMM_WORLD.Barrier()
if rank == 1:
    time.sleep(1)  # a rank that leaves later must not be ended by the status of the first
sys.exit(75)
