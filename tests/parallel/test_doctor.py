"""`mgpu doctor` under a real mpirun."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
if shutil.which("mpirun") is None:
    pytest.skip("no mpirun on PATH: apt-get install openmpi-bin", allow_module_level=True)

MPIRUN = ["mpirun", "--oversubscribe", "-np", "2"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# mpirun forwards it to the ranks. TensorFlow's own start is most of the time of this test.
DOCTOR = [sys.executable, "-m", "mgpu.cli.main", "doctor"]


def doctor(*command, **variables):
    done = subprocess.run(
        command, env={**os.environ, **AS_ROOT, **variables}, capture_output=True, text=True, timeout=240, check=False
    )
    return done


def test_two_ranks_are_compared_and_add_up_right():
    done = doctor(*MPIRUN, *DOCTOR, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)  # one report, so rank 0 alone printed
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ranks"] == 2
    assert checks["ranks' versions"]["found"] == "equal on 2 ranks"
    assert checks["allreduce"]["state"] == "ok"
    assert "1 MiB over 2 ranks is right on each" in checks["allreduce"]["found"]


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset, which puts both ranks on one core")
def test_what_mends_ranks_that_share_cores_ends_the_warning():
    """mpirun gives its setting to the ranks by a variable; its name is Open MPI's to choose."""
    ranks = [*MPIRUN[:2], "--mca", "mpi_yield_when_idle", "1", "-np", "2", "taskset", "-c", "0", *DOCTOR, "--json"]
    done = doctor(*ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["ranks' cores"]["state"] == "ok"
    assert "share 1 cores" in checks["ranks' cores"]["found"]


def test_a_fault_of_rank_1_alone_is_named_and_ends_the_job_with_1():
    both = [*MPIRUN[:2], "-np", "1", *DOCTOR, ":", "-np", "1", "-x", "KERAS_BACKEND=nonsense", *DOCTOR]
    done = doctor(*both)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "keras (rank 1)" in done.stdout
    assert "allreduce" in done.stdout


def test_a_launcher_of_another_mpi_is_a_fault_with_both_sizes():
    """The variables of a job of 2, and an MPI that knows of no job: every process would train alone."""
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    done = doctor(*DOCTOR, **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 0 of 2" in done.stdout
    assert "mgpu run" in done.stdout
