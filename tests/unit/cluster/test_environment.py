"""Variables recorded from Open MPI 4.1.4 and 5.0.11, MPICH 5.0.2 and Slurm 22.05, two hosts h1 and h2."""

import pytest

from mgpu.cluster.environment import Launch, launch_of, tasks_per_node
from mgpu.errors import LaunchError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "11"}
# sbatch -N2 -n4: three tasks on h1, one on h2. These are of the batch shell.
BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
STEP = {**BATCH, "SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "h[1-2]"} | {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
ON_H2 = {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
# mpirun in the batch job starts its daemon on h2 by an srun of one task, whose variables the ranks see.
DAEMON = {
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
}
DAEMON_STEP = {
    "SLURM_STEPID": "5",
    "SLURM_STEP_ID": "5",
    "SLURM_STEP_NODELIST": "h2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0", "SLURM_MPI_TYPE": "pmix"}
OMPI_ON_H2 = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OMPI, HYDRA, SRUN = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        pytest.param({}, Launch(0, 1, 0, 1, "none", ""), id="no-launcher"),
        pytest.param(OPEN_MPI, Launch(1, 2, 1, 2, "mpirun (Open MPI)", OMPI), id="open-mpi"),
        pytest.param(MPICH, Launch(1, 2, 1, 2, "mpirun (MPICH)", HYDRA), id="mpich"),
        # Reading PMIX_RANK or OMPI_* alone finds no job here.
        pytest.param(STEP | PMIX | ON_H2, Launch(3, 4, 0, 1, "srun", SRUN), id="srun-pmix-h2"),
        pytest.param(
            STEP | PMIX | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2"},
            Launch(2, 4, 2, 3, "srun", SRUN),
            id="srun-pmix-h1",
        ),
        # The PMI's rank taken for the local rank makes rank 3 take the fourth GPU of a host that has one.
        pytest.param(
            STEP | ON_H2 | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11", "SLURM_MPI_TYPE": "pmi2"},
            Launch(3, 4, 0, 1, "srun", SRUN),
            id="srun-pmi2",
        ),
        # Slurm's variables describe mpirun's daemon: rank 0 of 1.
        pytest.param(
            BATCH | DAEMON | DAEMON_STEP | OPEN_MPI | OMPI_ON_H2,
            Launch(1, 2, 0, 1, "mpirun (Open MPI)", OMPI),
            id="open-mpi-in-slurm-h2",
        ),
        pytest.param(
            BATCH | OPEN_MPI | OMPI_ON_H2 | {"OMPI_COMM_WORLD_RANK": "0"},
            Launch(0, 2, 0, 1, "mpirun (Open MPI)", OMPI),
            id="open-mpi-in-slurm-h1",
        ),
        pytest.param(
            BATCH | DAEMON | DAEMON_STEP | MPICH, Launch(1, 2, 1, 2, "mpirun (MPICH)", HYDRA), id="mpich-in-slurm"
        ),
        pytest.param(BATCH, Launch(), id="batch-shell"),
        pytest.param(
            {k: v for k, v in BATCH.items() if k not in ("SLURM_NTASKS", "SLURM_NPROCS")}
            | {"SLURM_TASKS_PER_NODE": "1(x2)"},
            Launch(),
            id="batch-shell-of-only-N2",
        ),
        # srun -n2 -N2 in a job of four tasks.
        pytest.param(
            STEP
            | ON_H2
            | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)"},
            Launch(1, 2, 0, 1, "srun", SRUN),
            id="step-smaller-than-its-job",
        ),
        # srun -N1 -n1 -w h2: nodes are counted within the step.
        pytest.param(BATCH | DAEMON | DAEMON_STEP, Launch(0, 1, 0, 1, "srun", SRUN), id="step-on-the-second-node"),
        pytest.param(
            STEP
            | ON_H2
            | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "CUDA_VISIBLE_DEVICES": "0"}
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_TASK": "1"},
            Launch(1, 2, 0, 1, "srun", SRUN),
            id="gpus-per-task",
        ),
        # sbatch inside a step of four: the new batch shell inherits the step's variables, and is no rank.
        pytest.param(STEP | {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}, Launch(), id="batch-shell-from-a-step"),
    ],
)
def test_the_launchers_variables_tell_the_rank(environ, launch):
    assert launch_of(environ) == launch


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("2,1", [2, 1]), ("3", [3]), ("1(x2), 4", [1, 1, 4])]
)
def test_slurms_tasks_per_node_are_read(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "2(x3))", "two", "2,,1", "-1", "2(3)"])
def test_other_tasks_per_node_are_refused(text):
    with pytest.raises(LaunchError, match=r"cannot be read at '.*'; it looks like 2\(x3\),1\..*Unset it: unset SLURM_"):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"},
            r"OMPI_COMM_WORLD_RANK='one' is not a number.*set by hand.*: unset OMPI_COMM_WORLD_RANK$",
            id="no-number",
        ),
        pytest.param(MPICH | {"PMI_SIZE": ""}, r"PMI_SIZE='' is not a number.*: unset PMI_SIZE$", id="empty"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
            r"rank 2 of 2, and 1 of 2 on its host.*inherited from another job.*: unset OMPI_COMM_WORLD_RANK OMPI",
            id="rank-is-the-size",
        ),
        pytest.param(MPICH | {"PMI_RANK": "-1"}, r"rank -1 of 2.*unset PMI_RANK PMI_SIZE MPI_LOCAL", id="negative"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
            r"1 of 0 on its host.*OMPI_COMM_WORLD_LOCAL_SIZE=0",
            id="none",
        ),
        pytest.param(
            STEP | {"SLURM_NODEID": "2"},
            r"node 2 of its step \(SLURM_NODEID=2\).*2 nodes.*=3,1\).*unset SLURM_NODEID SLURM_STEP_TASKS_PER_NODE$",
            id="node-outside-the-step",
        ),
        pytest.param(
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "3+1"}, r"'3\+1', cannot be read at '3\+1'", id="tasks-of-nodes"
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environ, message):
    with pytest.raises(LaunchError, match=message):
        launch_of(environ)


def test_an_mpi_that_tells_no_local_rank_counts_as_one_host():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert launch_of(environ) == Launch(1, 2, 1, 2, "mpirun (MPICH)", HYDRA)
