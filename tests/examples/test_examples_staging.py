import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(name):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_staging_experiment_holds_one_batch_after_every_step():
    out = run_example("staging_area.py")
    sizes = [int(size) for size in re.findall(r"(?:at first|\(fill\)|get and put|after clear): (\d+)", out)]
    assert sizes == [0, 1, 1, 1, 1, 1, 1, 0]  # before, filled, five one-step epochs, cleared
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert f"{32 * (8 + 1) * 4} bytes" in out


def test_the_double_buffered_feed_trains_every_row_once_and_in_order():
    out = run_example("double_buffered_feed.py")
    rows = [[int(row) for row in line.split(", ")] for line in re.findall(r"rows trained: \[(.*)\]", out)]
    assert rows == [list(range(10))] * 2
    steps = re.findall(r"step (\d): rows \[.*\], size before (\d), after (\d)", out)
    # Two batches are in the area when a step begins, except the last step, which drains it.
    assert steps == [("0", "2", "1"), ("1", "2", "1"), ("2", "2", "1"), ("3", "1", "0")] * 2
    assert re.findall(r"size at first: (\d)\n  filled, size: (\d)", out) == [("0", "1")] * 2
    assert "size at the end: 0" in out
