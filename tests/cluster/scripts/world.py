"""Checks that two ranks on two hosts add up, through MPI and by mgpu's own view of the launcher."""

import os
import socket
import sys

from mpi4py import MPI

from mgpu.cluster.environment import launch_of

comm = MPI.COMM_WORLD
launch = launch_of(os.environ)
assert comm.Get_size() == 2, comm.Get_size()
assert (launch.rank, launch.size) == (comm.Get_rank(), 2), launch
assert (launch.local_rank, launch.local_size) == (0, 1), launch
hosts = comm.allgather(socket.gethostname())
total = comm.allreduce(10 ** comm.Get_rank())
if comm.Get_rank() == 0:
    print(f"hosts {hosts}, total {total}, launcher {launch.launcher}, arguments {sys.argv[1:]}")
