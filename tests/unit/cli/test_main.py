import subprocess
import sys

import pytest
from click.testing import CliRunner

import mgpu
from mgpu.cli.main import main


@pytest.mark.parametrize("command", ["import mgpu.cli.main as m; m.main(['train', '--help'])", "import mgpu"])
def test_help_loads_no_tensorflow(command):
    """`mgpu --help` answers at once, and devices can still be configured after `import mgpu`."""
    script = f"""
import sys
try:
    {command}
except SystemExit:
    pass
print(sorted({{"tensorflow", "keras", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_the_package_version():
    assert CliRunner().invoke(main, ["--version"]).output == f"mgpu {mgpu.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["train", "--towers", "0"], "0 is not in the range x>=1", id="no-towers"),
        pytest.param(["train", "--staging-depth", "-1"], "-1 is not in the range x>=0", id="negative-depth"),
        pytest.param(["trian"], "No such command 'trian'", id="misspelt"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_missing_demo_package_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # makes `import sklearn` fail
    result = CliRunner().invoke(main, ["train"])
    assert result.exit_code == 1
    assert "needs the package sklearn" in result.output
    assert "pip install 'mgpu[demo]'" in result.output
