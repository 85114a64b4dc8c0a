"""A file is whole or not there, whatever interrupts the writing."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

from mgpu import saving
from mgpu.saving import atomic_path


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5", "a.h5", "b" * 240 + ".weights.h5"])
def test_the_temporary_name_ends_as_the_path_does_in_the_same_folder(name, tmp_path):
    with atomic_path(tmp_path / name) as written:
        assert written.parent == tmp_path
        assert written.name != name
        assert written.name.endswith(".weights.h5" if "weights" in name else name[1:])
        written.write_text("new")
        assert not (tmp_path / name).exists()
    assert (tmp_path / name).read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_str_gives_a_str(tmp_path):
    with atomic_path(str(tmp_path / "a.h5")) as written:
        assert isinstance(written, str)


def test_nothing_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.h5"
    path.write_text("old")
    with atomic_path(path):
        pass
    assert path.read_text() == "old"


def test_an_exception_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.keras"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as written:  # noqa: PT012
        written.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_sigkill_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.keras"
    path.write_text("old")
    script = (
        "import sys, time\nfrom mgpu.saving import atomic_path\n"
        "with atomic_path(sys.argv[1]) as written, open(written, 'w') as file:\n"
        "    file.write('half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
    )
    root = Path(saving.__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(root)}
    )
    with child:
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = set(tmp_path.iterdir()) - {path}

    with atomic_path(path) as written:  # too young to be nobody's
        written.write_text("new")
    assert left.exists()
    os.utime(left, (0, time.time() - 2 * saving._STALE_S))
    with atomic_path(path) as written:
        written.write_text("newer")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "newer"


def test_a_link_stays_a_link_and_a_file_keeps_its_permissions(tmp_path):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "a.h5", tmp_path / "best.h5"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic_path(link) as written:
        written.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_folder_replaces_a_folder(tmp_path):
    for text in ("old", "new"):
        with atomic_path(tmp_path / "export") as written:
            (written / "assets").mkdir(parents=True)
            (written / "assets" / text).write_text(text)
    assert [path.name for path in (tmp_path / "export" / "assets").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_file_does_not_replace_a_folder(tmp_path):
    """ModelCheckpoint turns this error into one that names its argument."""
    (tmp_path / "a.keras").mkdir()
    with pytest.raises(IsADirectoryError), atomic_path(tmp_path / "a.keras") as written:
        written.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.keras"]


def test_what_cannot_be_renamed_is_given_back(tmp_path):
    for path in ("gs://bucket/a.keras", tmp_path / "a.weights.json", tmp_path / "absent" / "a.keras", sys.stdout):
        with atomic_path(path) as written:
            assert written is path


@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_keras_writes_and_reads_it(name, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    save, load = model.save, keras.saving.load_model
    if "weights" in name:
        save, load = model.save_weights, model.load_weights
    with atomic_path(tmp_path / name) as written:
        save(written)
    load(tmp_path / name)
