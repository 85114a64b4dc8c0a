"""`mgpu run` and launch/mpirun.sh under the mpirun that is here."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgpu.cluster.mpi import num_cores

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
RANKS = FOLDER / "scripts" / "ranks.py"
RUN = (sys.executable, "-m", "mgpu.cli.main", "run")


def logs_of(folder):
    (logs,) = (folder / "mgpu-logs").iterdir()
    return {path.stem: path.read_text() for path in logs.glob("*.log")}


def test_rank_0_has_the_terminal_and_every_rank_a_log(call, tmp_path):
    done = call(*RUN, "-np", "2", RANKS, "ok", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "this is rank 0 of 2, --lr 0.1\n"
    assert "a warning of rank 0\n" in done.stderr
    assert "rank 1" not in done.stderr
    logs = logs_of(tmp_path)
    assert sorted(logs) == ["mpirun", "rank-0", "rank-1"]
    assert sorted(logs["rank-1"].splitlines()) == ["a warning of rank 1", "this is rank 1 of 2, --lr 0.1"]
    assert sorted(logs["rank-0"].splitlines()) == ["a warning of rank 0", "this is rank 0 of 2, --lr 0.1"]


def test_all_output_leads_each_line_by_its_rank(call, tmp_path):
    done = call(*RUN, "-np", "2", "--all-output", "--logs", "here", RANKS, "ok")
    assert sorted(done.stdout.splitlines()) == ["[0] this is rank 0 of 2, ", "[1] this is rank 1 of 2, "]
    assert "[1] a warning of rank 1\n" in done.stderr
    assert (tmp_path / "here" / "rank-1.log").exists()


def test_a_rank_that_exits_ends_the_job_with_its_status(call):
    done = call(*RUN, "-np", "2", RANKS, "exit")
    assert done.returncode == 3
    assert "mgpu run: status 3: rank 1 ended with status 3." in done.stderr


def test_a_rank_that_is_killed_is_named_with_the_signal(call):
    done = call(*RUN, "-np", "2", RANKS, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"status 137: rank 1 on \S+ was ended by signal 9 \(SIGKILL\)", done.stderr)


def test_the_traceback_of_another_rank_comes_last(call):
    done = call(*RUN, "-np", "2", RANKS, "raise")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: rank 1 cannot go on")
    said = done.stderr.index("mgpu run: status 1: rank 1 ")
    assert done.stderr.index("Traceback (most recent call last)", said) > said
    assert "earlier" not in done.stderr


def test_of_several_reports_the_first_is_printed_last(call):
    done = call(*RUN, "-np", "2", RANKS, "report")
    assert done.returncode == 1
    assert "mgpu run: status 1: rank 1 failed first." in done.stderr
    assert done.stderr.rstrip().endswith("mgpu: rank 1 of 2 failed\nValueError: the first")
    assert "has left" not in done.stderr


def test_reports_of_an_earlier_job_in_the_same_folder_are_none_of_this_one(call):
    assert call(*RUN, "-np", "2", "--logs", "here", RANKS, "report").returncode == 1
    assert call(*RUN, "-np", "2", "--logs", "here", RANKS, "ok").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(environ, tmp_path, number):
    job = subprocess.Popen([*RUN, "-np", "2", "--all-output", RANKS, "sleep"], **piped(environ, tmp_path))
    ranks = pids_of(job)
    job.send_signal(number)
    out, err = job.communicate(timeout=15)
    assert job.returncode == 128 + number, out + err
    assert f"status {128 + number}: ended by signal {number:d}" in err
    assert not [pid for pid in ranks if alive(pid)]


def test_ranks_do_not_outlive_an_mpirun_that_is_killed(environ, tmp_path):
    job = subprocess.Popen([*RUN, "-np", "2", "--all-output", RANKS, "sleep"], **piped(environ, tmp_path))
    ranks = pids_of(job)
    (mpirun,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
    os.kill(mpirun, signal.SIGKILL)
    job.communicate(timeout=15)
    assert job.returncode == 128 + signal.SIGKILL
    assert not [pid for pid in ranks if alive(pid)]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(environ, tmp_path):
    job = subprocess.Popen([*RUN, "-np", "2", "--all-output", RANKS, "sleep"], **piped(environ, tmp_path))
    ranks = pids_of(job)
    job.kill()
    job.communicate(timeout=15)
    deadline_s = time.monotonic() + 8
    while any(map(alive, ranks)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in ranks if alive(pid)]


def test_a_signal_to_save_reaches_the_ranks(environ, tmp_path):
    job = subprocess.Popen([*RUN, "-np", "2", "--all-output", RANKS, "usr1"], **piped(environ, tmp_path))
    for _ in range(4):
        job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=15)
    assert sorted(out.splitlines()) == ["[0] rank 0 saves", "[1] rank 1 saves"]


def piped(environ, folder):
    return {"env": environ, "cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def pids_of(job):
    """Return the process ids of both ranks of scripts/ranks.py, once they sleep."""
    pids = []
    while len(pids) < 2:
        line = job.stdout.readline()
        assert line, job.communicate()
        pids += map(int, re.findall(r"sleeping (\d+)", line))
    return pids


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("variables", "options", "printed"),
    [
        pytest.param({}, [], ["{share}", "{share}", "{interop}", "None"], id="share-of-the-cores"),
        pytest.param(
            {"OMP_NUM_THREADS": "7", "TF_NUM_INTEROP_THREADS": "9"},
            [],
            ["7", "{share}", "9", "None"],
            id="set-by-the-user",
        ),
        pytest.param(
            {}, ["--env", "OMP_NUM_THREADS=5", "--devices", "0,1"], ["5", "{share}", "{interop}", "0,1"], id="options"
        ),
    ],
)
def test_ranks_get_their_share_of_the_cores_unless_told_otherwise(call, variables, options, printed):
    share = max(1, num_cores() // 2)
    done = call(*RUN, "-np", "2", *options, RANKS, "threads", variables=variables)
    wanted = [text.format(share=share, interop=max(4, share)) for text in printed]
    assert re.findall(r"=(\S+)", done.stdout) == wanted


def test_a_module_or_a_command_of_mgpu_may_be_run(call):
    done = call(*RUN, "-np", "2", "-m", "platform", "--terse")
    assert done.returncode == 0
    assert "Linux" in done.stdout
    done = call(*RUN, "-np", "2", "--all-output", "--", "mgpu", "--version")
    assert re.fullmatch(r"\[[01]\] (mgpu [\d.]+)\n\[[01]\] \1\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["-np", "2", "trian.py"], r"'trian.py', which is no file in .*mgpu run -np 2 train.py", id="file"),
        pytest.param(["-np", "0", "x.py"], r"0 is not in the range x>=1", id="no-ranks"),
        pytest.param(["-np", "2"], r"Name a script: mgpu run -np 2 train.py", id="no-script"),
        pytest.param(["-np", "2", "--env", "NOT_SET", RANKS], r"Give a value: --env NOT_SET=", id="variable"),
        pytest.param(["-np", "4", "--per-host", "2", RANKS], r"4 ranks were asked for on 1 host .*-np 2,", id="room"),
        pytest.param(["-np", "2", "--hosts", "h[1", RANKS], r"'h\[1' cannot be read", id="hosts"),
    ],
)
def test_what_cannot_be_started_is_refused(call, arguments, message):
    done = call(*RUN, *arguments)
    assert done.returncode in (1, 2)
    assert re.search(message, " ".join(done.stderr.split()))


def test_an_mpirun_of_another_mpi_is_refused(call, tmp_path):
    """MPICH's mpirun with Open MPI's library runs, and every process is rank 0 of 1."""
    fake = tmp_path / "mpirun"
    other = "HYDRA build details:\n    Version: 4.0.2"
    fake.write_text(f"#!/bin/sh\necho '{other}'\n")
    fake.chmod(0o755)
    done = call(*RUN, "-np", "2", "--mpirun", "./mpirun", RANKS, "ok")
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert re.search(
        r"fits (Open MPI|MPICH) \d.*\./mpirun is of MPICH 4\.0\.2.*rank 0 of 1.*Get the one that fits: ", said
    )
    assert not (tmp_path / "mgpu-logs").exists()


def test_a_rank_does_not_start_ranks(call):
    done = call(*RUN, "-np", "2", RANKS, "ok", variables={"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "itself rank 1 of 2, started by mpirun (Open MPI)" in done.stderr


# ---- launch/mpirun.sh

SCRIPT = ROOT / "launch" / "mpirun.sh"


def open_mpi_says(folder, major):
    path = folder / f"open-mpi-{major}"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) {major}.1.0"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("major", "variables", "options", "line"),
    [
        pytest.param(
            4,
            {"NP": "3", "CORES": "2"},
            [],
            "-np 3 --map-by slot --bind-to none --oversubscribe {root}--tag-output --mca mpi_yield_when_idle 1 "
            "-x OMP_NUM_THREADS=1 -x TF_NUM_INTRAOP_THREADS=1 -x TF_NUM_INTEROP_THREADS=4",
            id="4",
        ),
        pytest.param(
            4,
            {"CORES": "16", "BIND": "core", "RSH": "/opt/rsh", "ENVIRONMENT": "A=1 B"},
            ["--np", "4", "--hosts", "h1:2,h2:2", "--per-host", "2", "--devices", "0,1"],
            "-np 4 --host h1:2,h2:2 --map-by ppr:2:node:PE=8 --bind-to core {root}--tag-output "
            "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3 "
            "--mca plm_rsh_agent /opt/rsh -x PATH -x OMP_NUM_THREADS=8 -x TF_NUM_INTRAOP_THREADS=8 "
            "-x TF_NUM_INTEROP_THREADS=8 -x CUDA_VISIBLE_DEVICES=0,1 -x A=1 -x B",
            id="4-hosts",
        ),
        pytest.param(
            5,
            {"NP": "3", "CORES": "2", "OMP_NUM_THREADS": "2"},
            [],
            "-np 3 --map-by slot:OVERSUBSCRIBE --bind-to none {root}--tag-output --mca mpi_yield_when_idle 1 "
            "-x TF_NUM_INTRAOP_THREADS=1 -x TF_NUM_INTEROP_THREADS=4",
            id="5",
        ),
    ],
)
def test_the_scripts_dry_run_prints_the_recorded_line(call, tmp_path, major, variables, options, line):
    mpirun = open_mpi_says(tmp_path, major)
    done = call(
        "env", "-i", f"PATH={os.environ['PATH']}", f"MPIRUN={mpirun}", *(f"{k}={v}" for k, v in variables.items()),
        SCRIPT, *options, "--dry-run", "train.py", "--name", "a b",
    )  # fmt: skip
    root = "--allow-run-as-root " if os.geteuid() == 0 else ""
    line = f"{mpirun} {line.format(root=root)} python3 train.py --name 'a b'"
    assert shlex.split(done.stdout) == shlex.split(line), done.stderr


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize(
    ("script", "command"),
    [
        pytest.param(["--np", "2"], ["-np", "2"], id="plain"),
        pytest.param(
            ["--np", "4", "--hosts", "h1:2,h2:2", "--devices", "0"],
            ["-np", "4", "--hosts", "h1:2,h2:2", "--devices", "0"],
            id="hosts",
        ),
        pytest.param(["--np", "64"], ["-np", "64"], id="more-than-cores"),
    ],
)
def test_the_script_and_the_command_start_the_same_line(call, tmp_path, major, script, command):
    """Neither may learn of a setting without the other."""
    mpirun = open_mpi_says(tmp_path, major)
    shell = call(SCRIPT, *script, "--dry-run", RANKS, variables={"MPIRUN": mpirun, "CORES": str(num_cores())})
    code = f"""
import sys
from mgpu.cluster import mpi
mpi.library = lambda python: mpi.Mpi("Open MPI", "{major}.1.0", python)
from mgpu.cli.main import main
main({["run", *command, "--mpirun", str(mpirun), "--dry-run", str(RANKS)]!r})
"""
    python = call(sys.executable, "-c", code)
    assert python.returncode == shell.returncode == 0, python.stderr + shell.stderr
    assert shlex.split(python.stdout) == shlex.split(shell.stdout)


def test_the_script_starts_ranks_and_ends_with_their_status(call, environ):
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], env=environ, capture_output=True, text=True).stdout:
        pytest.skip("mpirun is not Open MPI's")
    done = call(SCRIPT, "--np", "2", RANKS, "exit")
    assert done.returncode == 3
    assert "[1,1]<stdout>:" in done.stdout


def test_the_script_refuses_what_is_not_open_mpi(call, tmp_path):
    done = call(SCRIPT, "train.py", variables={"MPIRUN": "true"})
    assert done.returncode == 1
    assert "true is missing, or not Open MPI's. Set MPIRUN to one, or use: mgpu run -np 2 train.py" in done.stderr
    done = call(SCRIPT, "--hots", "h1", "train.py")
    assert done.returncode == 2
    assert "unknown option --hots; there are --np, --hosts," in done.stderr


def test_the_scripts_help_shows_its_options(call):
    assert "[--np N] [--hosts LIST]" in call(SCRIPT, "--help").stdout


@pytest.mark.parametrize("name", ["launch/mpirun.sh", "launch/slurm.sbatch", "tests/cluster/slurm/hosts.sh"])
def test_shellcheck_finds_nothing(call, name):
    assert shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = call("shellcheck", ROOT / name)
    assert done.returncode == 0, done.stdout
