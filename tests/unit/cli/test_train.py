import os
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

from mgpu.cli import train


def test_data_is_split_without_overlap_and_the_same_each_time():
    data, again = train.load_data(), train.load_data()
    assert [len(a) for a in data] == [1257, 1257, 180, 180, 360, 360]
    assert all(np.array_equal(a, b) for a, b in zip(data, again, strict=True))
    # scikit-learn's images are not all distinct, but as many distinct ones must be here as there.
    from sklearn.datasets import load_digits

    here = np.concatenate([data.x_train, data.x_val, data.x_test]).reshape(-1, 64)
    there = load_digits().data / 16.0
    assert np.array_equal(np.sort(here, axis=0), np.sort(there, axis=0).astype("float32"))
    assert 0 <= here.min() < here.max() == 1


def test_step_times_leave_out_the_first_epoch_and_each_epochs_first_step():
    times = train.StepTimes()
    for epoch in range(3):
        times.on_epoch_begin(epoch)
        for batch in range(4):
            times.on_train_batch_end(batch)
        times.on_epoch_end(epoch)
    assert len(times.steps_s) == 2 * 3


@pytest.mark.parametrize(
    ("rows", "towers", "text"),
    [(64, 2, "32 + 32 rows"), (41, 2, "20 + 21 rows"), (1, 2, "0 + 1 rows"), (7, 3, "2 + 2 + 3 rows")],
)
def test_division_follows_the_rule(rows, towers, text):
    """The rule: tower t gets the rows [B*t//T, B*(t+1)//T)."""
    assert train.divided(rows, towers) == text


def _described(**changes):
    described = {
        "towers": ["/CPU:0", "/CPU:1"],
        "strategy": "parameter_server",
        "variables_on": ["/CPU:0"],
        "staging_depth": 1,
        "staged_bytes_per_row": 264,
    }
    return described | changes


def test_report_tells_speed_division_and_staging(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    train.print_report(_described(), [0.010, 0.010, 0.030], rows=105, batch_size=64)
    told = capsys.readouterr().out
    assert "2,460 rows/s" in told  # the timed batch of an epoch has 41 rows, and takes 1/60 s on average
    assert "10.0 ms (median of 3)" in told
    assert "32 + 32 rows" in told
    assert "20 + 21 rows" in told
    assert "1 batch of 16,896 bytes" in told
    assert "/CPU:0, /CPU:1" in told


def test_report_says_so_when_nothing_was_measured_or_staged(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    train.print_report(_described(staging_depth=0, staged_bytes_per_row=None), [], rows=64, batch_size=64)
    told = capsys.readouterr().out
    assert "not measured" in told
    assert "nothing (--staging-depth 0)" in told
    assert "last batch" not in told


def test_a_file_that_predicts_otherwise_is_refused(tmp_path, monkeypatch):
    model = train.build_model()
    other = train.build_model()
    monkeypatch.setattr(keras.models, "load_model", lambda path: other)
    with pytest.raises(train.TrainingFailure, match=r"predicts otherwise.*please report it"):
        train.save_and_check(model, np.ones((2, 8, 8, 1), "float32"), tmp_path)


def _mgpu_train(folder, *arguments):
    # Own process: the devices must be configured before TensorFlow starts.
    return subprocess.run(
        [sys.executable, "-m", "mgpu.cli.main", "train", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "110", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_the_job_reaches_its_accuracy_and_saves_a_plain_model(tmp_path):
    done = _mgpu_train(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 logical CPU devices" in done.stdout
    assert "20 + 21 rows" in done.stdout
    assert "16,896 bytes" in done.stdout  # 64 rows of 64 float32 and one int64
    with zipfile.ZipFile(tmp_path / "demo-output" / "digits.keras") as file:
        assert b"mgpu" not in file.read("config.json")


@pytest.mark.slow
def test_the_job_fails_with_a_remedy_when_it_learns_too_little(tmp_path):
    done = _mgpu_train(tmp_path, "--epochs", "1", "--batch-size", "1257")
    assert done.returncode == 1
    assert "is expected" in done.stderr
    assert "--epochs 16" in done.stderr
