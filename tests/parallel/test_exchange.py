"""The strategies over ranks under a real mpirun: every rank compares what it gets with NumPy's sums."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py")
if shutil.which("mpirun") is None:
    pytest.skip("no mpirun on PATH: apt-get install openmpi-bin", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "exchange.py"
ENVIRON = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PYTHONPATH": str(ROOT),
}


@pytest.mark.parametrize(
    ("kind", "bucket_bytes", "sparse_as_dense"),
    [
        pytest.param("mpi", 64, None, id="mpi, several buckets"),  # begun in another order on a rank fails here
        pytest.param("mpi", 1 << 20, False, id="mpi, one bucket, slices"),
        pytest.param("horovod", 64, None, id="horovod, several buckets"),
        pytest.param("horovod", 1 << 20, True, id="horovod, one bucket, dense"),
    ],
)
def test_every_rank_gets_the_sums_of_all_bit_for_bit_alike(kind, bucket_bytes, sparse_as_dense):
    if kind == "horovod":
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: mgpu horovod install")
    arguments = [sys.executable, str(SCRIPT), kind, str(bucket_bytes), str(sparse_as_dense)]
    done = subprocess.run(
        ["mpirun", "-np", "3", "--oversubscribe", *arguments],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 3: exact") == 3, done.stdout + done.stderr
