import subprocess
import sys

import pytest
from click.testing import CliRunner

from mgpu.cli.main import main
from mgpu.cluster import horovod_build
from mgpu.cluster.findings import Finding
from mgpu.cluster.toolchain import Toolchain

TOOLS = Toolchain(
    "tensorflow 2.21.0", "cpython-311", "c++ 12", "mpirun (Open MPI) 4.1.4", "linux", "", "/usr/bin/cmake"
)

COMPLETE = (Finding("make", "ok", "GNU Make 4.3"),)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Run `mgpu horovod install` where `findings` are found and the installation reports `report`."""

    def run(*arguments, findings=COMPLETE, report=None):
        monkeypatch.setattr(horovod_build, "inspect", lambda environ, nccl: (list(findings), TOOLS))
        if report is not None:
            monkeypatch.setattr(horovod_build.Installer, "install", lambda self: report)
        return CliRunner().invoke(main, ["horovod", "install", "--cache", str(tmp_path / "cache"), *arguments])

    return run


def test_what_was_built_is_said(install):
    report = {"version": "0.28.1", "tensorflow": "2.21.0", "mpi": True, "gloo": True, "nccl": False}
    result = install(report=report)
    assert result.exit_code == 0
    assert "Horovod 0.28.1 works with TensorFlow 2.21.0; it has MPI, GLOO\n" in result.output


def test_a_dry_run_shows_checks_key_and_commands_and_runs_none(install, tmp_path):
    result = install("--dry-run")
    assert result.exit_code == 0
    assert "✓ make" in result.output
    assert f"cache: {tmp_path}/cache/tf2.21.0-cpython-311-" in result.output
    assert "HOROVOD_WITH_MPI=1" in result.output
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]], ids=["install", "dry-run"])
def test_what_is_missing_ends_with_1_and_its_remedy(install, arguments):
    result = install(*arguments, findings=[Finding("MPI", "fail", "none", "install an MPI")])
    assert result.exit_code == 1
    assert "install an MPI" in result.output


def test_nccl_is_labelled_untried(install):
    result = install("--nccl", "--dry-run")
    assert "a build with NCCL is untried" in result.output
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in result.output


def test_neither_command_loads_tensorflow_or_horovod_itself():
    """A build for another TensorFlow can crash the process that loads it."""
    script = """
import sys
import mgpu.cli.doctor, mgpu.cluster.horovod_build
from mgpu.cluster.toolchain import inspect
inspect({})
print(sorted({"tensorflow", "keras", "horovod", "mpi4py"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
