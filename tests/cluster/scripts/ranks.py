"""Says which rank this is, and then ends in the way that its argument names."""

import os
import signal
import sys
import threading
import time

from mpi4py import MPI

rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
print(f"this is rank {rank} of {size}, {' '.join(sys.argv[2:])}")
print(f"a warning of rank {rank}", file=sys.stderr)
MPI.COMM_WORLD.Barrier()
match sys.argv[1] if rank == 1 else "":
    case "exit":
        os._exit(3)
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "raise":
        print("earlier", file=sys.stderr)
        raise ValueError("rank 1 cannot go on")
    case "report":
        # As mgpu.cluster.watch does: rank 0 finds out later that rank 1 has failed.
        folder = os.environ["MGPU_FAILURES"]
        for seconds, failed, text in ((20.5, 0, "RankError: rank 1 has left"), (9.5, 1, "ValueError: the first")):
            with open(f"{folder}/{seconds}-rank{failed}.txt", "w") as file:
                file.write(f"mgpu: rank {failed} of 2 failed\n{text}\n")
        MPI.COMM_WORLD.Abort(1)
if sys.argv[1] == "sleep":
    print(f"sleeping {os.getpid()}", flush=True)
    time.sleep(60)
if sys.argv[1] == "threads":
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "CUDA_VISIBLE_DEVICES")
    print(*(f"{name}={os.environ.get(name)}" for name in names))
if sys.argv[1] == "usr1":
    saved = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: saved.set())
    print("ready", flush=True)
    while not saved.is_set():
        time.sleep(0.05)
    print(f"rank {rank} saves")
