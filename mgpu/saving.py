"""How a file is written: under another name in the same folder, and renamed when it is whole."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any

# What a killed process left is removed by a later save of the same path, once nobody can be writing it any more.
_MARK = ".mgpu-saving-"
_STALE_S = 24 * 3600.0
_LONGEST_NAME_BYTES = 255


@contextlib.contextmanager
def atomic_path(path: Any) -> Iterator[Any]:
    """Give a temporary path to write to; move it to `path` when the block ends, remove it when the block raises.

    Whoever reads `path` finds the old file or the new one, whole, also after a kill or a power cut. The temporary
    name ends as `path` does, since Keras reads the format from it. It lies in the same folder (a rename within one
    file system), behind symbolic links. An existing file keeps its permissions.

    A folder (`model.export`) is written the same way; the old one is moved aside in between, so that for an instant
    there is none. What cannot be renamed is given back as it is and written in place: addresses such as
    "gs://bucket/a.keras", open files, `.weights.json` (one of several files), and paths in a folder that is not
    there, for which Keras has its own message.

    Args:
        path: a str or a path. Nothing asks before it is overwritten.

    Raises:
        OSError: as `os.replace` and `os.fsync` do.
    """
    if not _renamable(path):
        yield path
        return
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    _remove_stale(folder, name)
    mark = f"{_MARK}{uuid.uuid4().hex[:12]}-"
    kept = os.fsencode(name)[-(_LONGEST_NAME_BYTES - len(mark)) :]
    written = os.path.join(folder, mark + kept.decode(errors="ignore"))
    try:
        yield written if isinstance(path, str) else type(path)(written)
        if os.path.lexists(written):
            _flush(written)
            _move(written, target)
            _sync(folder)
    finally:
        _remove(written)


def _renamable(path: Any) -> bool:
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    if not isinstance(text, str) or "://" in text or text.endswith(".weights.json"):
        return False
    return os.path.isdir(os.path.dirname(os.path.realpath(text)))


def _move(written: str, target: str) -> None:
    if os.path.isdir(written) and os.path.isdir(target):
        aside = f"{written}-old"
        os.rename(target, aside)
        try:
            os.rename(written, target)
        except OSError:
            os.rename(aside, target)
            raise
        shutil.rmtree(aside)
        return
    if os.path.isfile(target) and os.path.isfile(written):
        shutil.copymode(target, written)
    os.replace(written, target)


def _flush(path: str) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)
    if not os.path.isdir(path):
        _sync(path)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(folder: str, name: str) -> None:
    for entry in os.scandir(folder):
        if not (entry.name.startswith(_MARK) and entry.name.endswith(name)):
            continue
        with contextlib.suppress(FileNotFoundError):
            if time.time() - entry.stat().st_mtime > _STALE_S:
                _remove(entry.path)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
