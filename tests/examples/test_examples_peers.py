"""The comparison of docs/correctness.md: what it says of mgpu holds, and the document shows what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# case (37 columns), compared (16), size, MirroredStrategy, mgpu
ROW = re.compile(
    r"(?P<case>.{37}) (?P<what>\w+)(?P<mark> \*)? +(?P<size>\S+) +(?P<peer>\S+) +(?P<mgpu>\d\.\de[+-]\d\d|nan)"
)


def rows(text):
    """Return the lines of the table, by case and what is compared."""
    found = [match for line in text.splitlines() if (match := ROW.fullmatch(line.strip()))]
    return {(m["case"].strip(), m["what"]): m for m in found}


@pytest.fixture(scope="module")
def printed():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "peers.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return rows(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mgpu_gives_the_plain_models_numbers_in_every_case(printed):
    far = {key: m["mgpu"] for key, m in printed.items() if not m["mark"] and not float(m["mgpu"]) < 1e-4}
    assert len(printed) > 20
    assert not far


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_document_shows_the_cases_that_are_compared(printed):
    shown = rows((ROOT / "docs" / "correctness.md").read_text(encoding="utf-8"))
    assert list(shown) == list(printed)
    assert {key for key, m in shown.items() if m["mark"]} == {("BatchNormalization", "moving_variance")}
