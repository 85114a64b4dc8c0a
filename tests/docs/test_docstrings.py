"""Runs the examples in the docstrings of every public name."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu

ROOT = Path(__file__).parents[2]

# Each name's examples start as a user's script would: nothing imported. All share one process, which has four CPU
# devices, as one example asks for.
SCRIPT = """
import doctest, inspect, sys
sys.path.insert(0, {root!r})
import mgpu

mgpu.set_logical_cpu_devices(4)
# Only the examples: what a model prints on its first step is not compared.
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
finder = doctest.DocTestFinder(recurse=True)
for name in mgpu.__all__:
    thing = getattr(mgpu, name)
    if inspect.isroutine(thing) or inspect.isclass(thing):
        for test in finder.find(thing, name, module=False, globs={{}}):
            failed, tried = runner.run(test, clear_globs=True)
            if tried:
                print("RAN", test.name, tried, failed)
"""


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT.format(root=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _with_examples():
    """Return the public names whose own docstring has an example, read without running it."""
    things = {name: getattr(mgpu, name) for name in mgpu.__all__}
    callables = {name: thing for name, thing in things.items() if inspect.isroutine(thing) or inspect.isclass(thing)}
    return [name for name, thing in callables.items() if ">>>" in (inspect.getdoc(thing) or "")]


@pytest.mark.parametrize("name", _with_examples())
def test_example_gives_what_it_shows(report, name):
    found = re.search(rf"^RAN {name} (\d+) (\d+)$", report, re.MULTILINE)
    assert found, f"no example of {name} was run"
    assert found[2] == "0", report


def test_no_example_fails(report):
    """Also those of the methods of public classes."""
    failures = re.findall(r"^RAN (\S+) \d+ [1-9]\d*$", report, re.MULTILINE)
    assert not failures, report


@pytest.mark.parametrize("name", [name for name in mgpu.__all__ if not name.startswith("_")])
def test_every_public_name_has_a_docstring_of_its_own(name):
    thing = getattr(mgpu, name)
    assert (thing.__doc__ or "").strip()
    assert thing.__doc__.strip().split("\n")[0].endswith((".", ":"))
