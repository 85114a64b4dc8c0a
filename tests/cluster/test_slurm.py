"""launch/slurm.sbatch on a real Slurm of two hosts."""

import re
import subprocess
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SBATCH = FOLDER.parent.parent / "launch" / "slurm.sbatch"
SCRIPTS = FOLDER / "scripts"


@pytest.fixture
def submit(slurm, environ, tmp_path):
    """Submits launch/slurm.sbatch and returns the job's id; its output is in job.out."""
    _, variables = slurm

    def submit_job(*script, options=(), launcher=None):
        chosen = {} if launcher is None else {"LAUNCHER": launcher}
        command = ["sbatch", "--parsable", "--nodes=2", "--output=job.out", "--chdir", tmp_path, *options, SBATCH]
        done = subprocess.run(
            [str(part) for part in (*command, *script)],
            env={
                **environ,
                **variables,
                **chosen,
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return submit_job


@pytest.fixture
def ended(slurm, environ, tmp_path):
    """Waits for a job's end and returns its exit status and what it wrote."""
    _, variables = slurm

    def wait(job, timeout_s):
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            text = shown(job, {**environ, **variables})
            state = re.search(r"JobState=(\S+)", text)[1]
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                status = int(re.search(r"ExitCode=(\d+):", text)[1])
                return status, (tmp_path / "job.out").read_text()
            time.sleep(0.1)
        subprocess.run(["scancel", "--full", "-s", "KILL", job], env={**environ, **variables}, check=False)
        out = tmp_path / "job.out"
        return pytest.fail(f"job {job} did not end in {timeout_s} s: {text}\n{out.exists() and out.read_text()}")

    return wait


def shown(job, environ):
    return subprocess.run(
        ["scontrol", "show", "job", job], env=environ, capture_output=True, text=True, timeout=30, check=True
    ).stdout


# A row: the script, its arguments, what its output must match, and how long it may take.
JOBS = [
    pytest.param(
        SCRIPTS / "world.py",
        ("--lr", "0.1"),
        r"hosts \['h1', 'h2'\], total 11, launcher {launcher}, arguments \['--lr', '0.1'\]",
        30,
        id="world",
    ),
]


@pytest.mark.parametrize(("launcher", "says"), [("srun", "srun"), ("mpirun", r"mpirun \((Open MPI|MPICH)\)")])
@pytest.mark.parametrize(("script", "arguments", "wanted", "timeout_s"), JOBS)
def test_a_script_runs_on_two_hosts(submit, ended, script, arguments, wanted, timeout_s, launcher, says):
    job = submit(script, *arguments, launcher=launcher)
    status, text = ended(job, timeout_s)
    assert status == 0, text
    assert re.search(wanted.format(launcher=says), text), text


def test_the_launcher_that_fits_is_chosen(submit, ended):
    from mgpu.cluster.mpi import library

    job = submit(SCRIPTS / "world.py")
    status, text = ended(job, 30)
    assert status == 0, text
    fits = "srun" if library().kind == "Open MPI" else "mpirun"
    assert f"mgpu: 2 ranks on h[1-2] by {fits}, restart 0: " in text


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_rank_that_is_killed_ends_the_job(submit, ended, launcher):
    """Under srun without --wait, the other rank waits until the time is up."""
    job = submit(SCRIPTS / "waits.py", "killed", launcher=launcher)
    status, text = ended(job, 20)
    # srun gives the highest status of all ranks, and those that it ends with the killed one have 143 (SIGTERM).
    assert status in ({137, 143} if launcher == "srun" else {137}), text


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_the_warning_signal_reaches_every_rank_and_its_status_the_job(
    submit, ended, slurm, environ, tmp_path, launcher
):
    job = submit(SCRIPTS / "waits.py", "saves", launcher=launcher)
    _, variables = slurm
    logs = "rank 1 is ready"
    deadline_s = time.monotonic() + 20
    while logs not in everything(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    # As #SBATCH --signal=B:USR1@120 does: to the shell of the batch job only.
    subprocess.run(["scancel", "--batch", "-s", "USR1", job], env={**environ, **variables}, timeout=30, check=True)
    status, text = ended(job, 15)
    assert status == 75, text
    said = everything(tmp_path)
    assert "rank 0 saves" in said
    assert "rank 1 saves" in said


def everything(folder):
    """Return the job's output and, under mpirun, the ranks' logs."""
    return "".join(path.read_text() for path in [*folder.glob("job.out"), *folder.glob("mgpu-logs/*/rank-*.log")])


def test_slurm_accepts_the_options_in_the_script(slurm, call):
    _, variables = slurm
    done = call("sbatch", "--test-only", SBATCH, "train.py", variables=variables)
    assert done.returncode == 0, done.stderr


def test_a_job_without_a_script_says_how(submit, ended):
    status, text = ended(submit(), 15)
    assert status == 2
    assert "no script was named. As in: sbatch --nodes=2" in text


def test_ranks_start_on_hosts_by_a_remote_shell(slurm, call):
    """`mgpu run --hosts` outside of a batch system, as with ssh."""
    import sys

    folder, _ = slurm
    done = call(
        *(sys.executable, "-m", "mgpu.cli.main", "run", "-np", "2", "--hosts", "h[1-2]:1", "--rsh", folder / "rsh"),
        SCRIPTS / "world.py",
    )
    assert done.returncode == 0, done.stderr
    assert "hosts ['h1', 'h2'], total 11, launcher mpirun" in done.stdout
