"""What every test starts from and must leave behind: four CPU devices, clean Keras, no threads, no files."""

import os

# Before anything imports TensorFlow.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import threading
import time
from pathlib import Path

import hypothesis
import hypothesis.configuration
import keras
import pytest
import tensorflow as tf

ROOT = Path(__file__).parent.parent
NUM_CPU_DEVICES = 4

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * NUM_CPU_DEVICES
)
# Two processes of pytest-xdist share two cores. Inter-op threads may wait for each other (a get from a
# staging area waits for its put), so there is one for each device.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(NUM_CPU_DEVICES)

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
# A test file may register profiles of its own under other names, and read the same variable.
_profile = os.environ.get("HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(_profile if _profile in ("ci", "explore") else "ci")
hypothesis.configuration.set_hypothesis_home_dir(ROOT / ".hypothesis")


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Give layers their first names again, and every test the same random numbers."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(monkeypatch, tmp_path_factory):
    """Run the test in an empty folder; fail it when it leaves a file, a thread or a changed environment.

    It asks for `monkeypatch` to be torn down after it, and so can undo what the test patched before it looks.
    """
    folder = tmp_path_factory.mktemp("cwd")
    threads = set(threading.enumerate())
    environment = _environment()
    before = Path.cwd()
    os.chdir(folder)
    yield
    monkeypatch.undo()
    os.chdir(before)
    faults = [f"the file {path.name} in the current folder" for path in sorted(folder.iterdir())]
    faults += [f"the thread {thread.name}" for thread in _left_over(threads)]
    after = _environment()
    faults += [
        f"the environment variable {name}: {environment.get(name)!r} became {after.get(name)!r}"
        for name in sorted(environment.keys() | after.keys())
        if environment.get(name) != after.get(name)
    ]
    if faults:
        pytest.fail("The test left behind: " + "; ".join(faults), pytrace=False)


def _environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _left_over(before, patience_s=2.0):
    """Return the threads not in `before` that outlive `patience_s` and are ours, or not daemons."""
    deadline_s = time.monotonic() + patience_s
    while True:
        ours = [
            thread
            for thread in threading.enumerate()
            if thread not in before and (not thread.daemon or thread.name.startswith("mgpu"))
        ]
        if not ours or time.monotonic() > deadline_s:
            return ours
        time.sleep(0.02)
