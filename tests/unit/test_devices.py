import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import mgpu
from mgpu.devices import choose_devices, get_available_gpus, resolve_devices, set_logical_cpu_devices
from mgpu.errors import DeviceError

ROOT = Path(mgpu.__file__).parents[1]


def machine(num_gpus, num_cpus=1):
    return [f"/GPU:{i}" for i in range(num_gpus)] + [f"/CPU:{i}" for i in range(num_cpus)]


def run_python(code):
    """Run `code` in a Python of its own, where TensorFlow has not started, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


LOGICAL = tf.config.LogicalDevice("/device:GPU:1", "GPU")
PHYSICAL = tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")


@pytest.mark.parametrize(
    "gpus",
    [
        "/gpu:1",
        "/GPU:1",
        "GPU:1",
        "gpu:1",
        "/device:GPU:1",
        "device:gpu:1",
        "/job:localhost/replica:0/task:0/device:GPU:1",
        "/job:localhost/task:0/device:gpu:1",
        " /gpu:1 ",
        pytest.param(tf.DeviceSpec(device_type="GPU", device_index=1), id="DeviceSpec"),
        pytest.param(
            tf.DeviceSpec(job="localhost", replica=0, task=0, device_type="gpu", device_index=1),
            id="full-DeviceSpec",
        ),
        pytest.param(LOGICAL, id="LogicalDevice"),
        pytest.param(PHYSICAL, id="PhysicalDevice"),
        pytest.param(1, id="id"),
        pytest.param(np.int64(1), id="numpy-id"),
    ],
)
def test_every_spelling_of_a_device_gives_its_canonical_name(gpus):
    assert choose_devices([gpus], visible=machine(2)) == ["/GPU:1"]
    if not isinstance(gpus, (int, np.integer)):
        assert choose_devices(gpus, visible=machine(2)) == ["/GPU:1"]


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "num_cpus", "expected"),
    [
        pytest.param(None, 8, 1, [f"/GPU:{i}" for i in range(8)], id="all-of-8"),
        pytest.param(None, 1, 4, ["/GPU:0"], id="all-of-1-beside-cpus"),
        pytest.param(None, 0, 4, ["/CPU:0", "/CPU:1", "/CPU:2", "/CPU:3"], id="cpus-stand-in"),
        pytest.param(None, 0, 1, ["/CPU:0"], id="nothing-but-a-cpu"),
        pytest.param(2, 8, 1, ["/GPU:0", "/GPU:1"], id="first-2"),
        pytest.param(1, 8, 1, ["/GPU:0"], id="first"),
        pytest.param(np.int32(2), 2, 1, ["/GPU:0", "/GPU:1"], id="numpy-count"),
        pytest.param(2, 0, 4, ["/CPU:0", "/CPU:1"], id="first-2-cpus"),
        pytest.param([1, 3], 0, 4, ["/CPU:1", "/CPU:3"], id="cpu-ids"),
        pytest.param(0, 8, 1, ["/CPU:0"], id="cpu-only-beside-8"),
        pytest.param(0, 0, 4, ["/CPU:0"], id="cpu-only"),
        pytest.param([7, 0], 8, 1, ["/GPU:7", "/GPU:0"], id="order-kept"),
        pytest.param((1,), 2, 1, ["/GPU:1"], id="tuple"),
        pytest.param(range(2), 2, 1, ["/GPU:0", "/GPU:1"], id="range"),
        pytest.param(["/gpu:0", 1, "/device:GPU:2"], 8, 1, ["/GPU:0", "/GPU:1", "/GPU:2"], id="mixed"),
        pytest.param(["cpu:1", "CPU:0"], 2, 2, ["/CPU:1", "/CPU:0"], id="named-cpus-beside-gpus"),
    ],
)
def test_gpus_means_these_devices(gpus, num_gpus, num_cpus, expected):
    assert choose_devices(gpus, visible=machine(num_gpus, num_cpus)) == expected


def test_a_divided_physical_device_means_all_its_parts():
    homes = {"/physical_device:GPU:0": ["/GPU:0", "/GPU:1"], "/physical_device:GPU:1": ["/GPU:2"]}
    assert choose_devices([PHYSICAL], visible=machine(3), physical=homes) == ["/GPU:2"]
    first = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    assert choose_devices(first, visible=machine(3), physical=homes) == ["/GPU:0", "/GPU:1"]


REFUSED = [
    pytest.param([], "make_parallel\\(gpus=\\[\\]\\).*empty list", id="empty-list"),
    pytest.param((), "gpus=\\(\\).*empty list", id="empty-tuple"),
    pytest.param(-1, "gpus=-1.*cannot be negative", id="negative"),
    pytest.param([-1], "gpus=\\[-1\\].*no id -1", id="negative-id"),
    pytest.param(True, "gpus=True.*True \\(bool\\)", id="bool"),
    pytest.param([False], "False \\(bool\\)", id="bool-id"),
    pytest.param(np.True_, "gpus=True", id="numpy-bool"),
    pytest.param(2.0, "gpus=2.0.*2.0 \\(float\\)", id="float"),
    pytest.param(float("nan"), "nan \\(float\\)", id="nan"),
    pytest.param([0, 0], "gpus=\\[0, 0\\].*[GC]PU:0 more than once", id="twice"),
    pytest.param([np.int64(0), 0], "gpus=\\[0, 0\\].*more than once", id="twice-numpy"),
    pytest.param(99, "gpus=99", id="count-99"),
    pytest.param([99], "gpus=\\[99\\].*no id 99", id="id-99"),
    pytest.param("GPU:99", "gpus='GPU:99'.*no /GPU:99", id="name-99"),
    pytest.param("cpu:99", "no /CPU:99.*set_logical_cpu_devices\\(100\\)", id="cpu-99"),
    pytest.param("/device:XLA_GPU:0", "old TensorFlow's second name", id="xla"),
    pytest.param("/job:worker/task:1/device:GPU:0", "not the name of a local", id="remote"),
    pytest.param("gpu", "not the name of a local CPU or GPU with its number", id="no-number"),
    pytest.param("0,1", "not the name", id="comma"),
    pytest.param("", "not the name", id="blank"),
    pytest.param([None], "None \\(NoneType\\)", id="none-inside"),
    pytest.param({0, 1}, "set", id="set"),
    pytest.param(np.array([0, 1]), "ndarray", id="array"),
    pytest.param(np.array(1), "ndarray", id="0-d-array"),
]


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
@pytest.mark.parametrize(("gpus", "message"), REFUSED)
def test_a_refusal_says_what_is_there_and_a_remedy_that_works(gpus, message, num_gpus):
    """Each `gpus=...` that a message offers is tried on the same machine; a remedy wrong at an edge fails."""
    visible = machine(num_gpus)
    with pytest.raises(DeviceError, match=message) as error:
        choose_devices(gpus, visible=visible, mask="0,1")
    text = str(error.value)
    assert "CUDA_VISIBLE_DEVICES: '0,1'" in text
    assert ("sees no GPU, only /CPU:0" if num_gpus == 0 else f"sees {num_gpus} GPU") in text
    offers = re.findall(r"gpus=(None|-?\d+|'[^']*'|\[[^]]*\])", text.split("). ", 1)[1])
    assert offers, text
    for offer in offers:
        names = {"None": None}
        chosen = choose_devices(eval(offer, names), visible=visible)
        assert chosen, text
        assert set(chosen) <= set(visible), text


def test_two_spellings_of_one_device_are_one_device():
    with pytest.raises(DeviceError, match=r"names /GPU:0 more than once.*Pass gpus=\['/GPU:0', '/GPU:1'\]"):
        choose_devices(["/gpu:0", "GPU:1", "GPU:0"], visible=machine(2))


@pytest.mark.parametrize(
    ("num_gpus", "mask", "expected"),
    [
        (0, None, "Pass gpus=None to use the one CPU device, or compare with nvidia-smi, or to rehearse on "
                  "the CPU call mgpu.set_logical_cpu_devices(9) first."),
        (0, "", "Pass gpus=None to use the one CPU device, or check that CUDA_VISIBLE_DEVICES lists 9 ids "
                "before TensorFlow is imported, or to rehearse on the CPU call "
                "mgpu.set_logical_cpu_devices(9) first."),
        (1, "1", "Pass gpus=None to use the one GPU, or check that CUDA_VISIBLE_DEVICES lists 9 ids "
                 "before TensorFlow is imported."),
        (8, None, "Pass gpus=None to use all 8 GPUs, or compare with nvidia-smi."),
    ],
    ids=["no-gpu", "gpus-hidden", "one-shown", "eight"],
)  # fmt: skip
def test_too_high_a_count_is_answered_with_what_can_be_done(num_gpus, mask, expected):
    with pytest.raises(DeviceError) as error:
        choose_devices(9, visible=machine(num_gpus), mask=mask)
    assert str(error.value).endswith(expected)
    assert f"CUDA_VISIBLE_DEVICES: {'not set' if mask is None else repr(mask)}" in str(error.value)


def test_an_id_outside_the_mask_is_explained():
    """CUDA_VISIBLE_DEVICES=1 renumbers: the one GPU shown is id 0."""
    with pytest.raises(DeviceError, match=r"no id 1: ids count the visible devices from 0, so the last is 0"):
        choose_devices([1], visible=machine(1), mask="1")


def test_a_process_without_any_device_is_refused():
    with pytest.raises(DeviceError, match="sees no GPU, only nothing"):
        choose_devices(None, visible=[])


def test_logical_cpu_devices_resolve_to_names():
    """Runs with however many logical CPUs the test session has."""
    expected = [f"/CPU:{i}" for i in range(len(tf.config.list_logical_devices("CPU")))]
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("GPUs are visible, so CPUs do not stand in")
    assert resolve_devices(None) == expected
    assert resolve_devices(tf.config.list_logical_devices("CPU")) == expected
    assert resolve_devices(tf.config.list_physical_devices("CPU")) == expected
    assert resolve_devices(0) == ["/CPU:0"]


def test_refusals_name_the_environment_and_the_caller(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(DeviceError, match=r"^other\(gpus=99\): .*CUDA_VISIBLE_DEVICES: '3,4'"):
        resolve_devices(99, asked="other(gpus={})")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("names", ["/GPU:0", "/GPU:1", "/GPU:2"]),
        ("ids", [0, 1, 2]),
        ("specs", [tf.DeviceSpec(device_type="GPU", device_index=i) for i in range(3)]),
    ],
)
def test_gpus_are_listed_in_the_form_asked_for(monkeypatch, spec, expected):
    monkeypatch.setattr("mgpu.devices._names", lambda kind: [f"/{kind}:{i}" for i in range(3)])
    assert get_available_gpus(spec=spec) == expected
    assert get_available_gpus(2, spec=spec) == expected[:2]
    assert get_available_gpus(0, spec=spec) == []
    assert get_available_gpus(99, spec=spec) == expected


@pytest.mark.parametrize("n", [-1, 1.0, True, "2"])
def test_a_count_that_is_none_is_refused(n):
    with pytest.raises(DeviceError, match=f"n={n!r}.*Pass n=None"):
        get_available_gpus(n)
    if n != -1:
        with pytest.raises(DeviceError, match="Pass an integer of 1 or more, such as n=2"):
            set_logical_cpu_devices(n)


def test_an_unknown_form_lists_the_valid_ones():
    with pytest.raises(DeviceError, match=r"spec='name'.*one of: names, ids, specs.*Pass spec=\"names\""):
        get_available_gpus(spec="name")


def test_zero_logical_cpu_devices_are_refused():
    with pytest.raises(DeviceError, match=r"n=0.*At least one"):
        set_logical_cpu_devices(0)


def test_importing_mgpu_loads_neither_tensorflow_nor_keras():
    assert run_python("import sys, mgpu; print({'tensorflow', 'keras'} & set(sys.modules))") == "set()"


def test_listing_and_resolving_start_no_device():
    """Memory growth and logical devices can still be set after; TensorFlow refuses that once started."""
    code = """
import mgpu, tensorflow as tf
from mgpu.devices import resolve_devices
mgpu.get_available_gpus(), mgpu.get_available_gpus(1, spec="specs"), resolve_devices(None)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
print(resolve_devices(["cpu:2", "CPU:0"]), len(tf.config.list_logical_devices("CPU")))
"""
    assert run_python(code) == "['/CPU:2', '/CPU:0'] 3"


def test_logical_cpu_devices_can_be_asked_for_again_but_not_changed_once_started():
    code = """
import mgpu, tensorflow as tf
print(mgpu.set_logical_cpu_devices(2), mgpu.set_logical_cpu_devices(3), mgpu.set_logical_cpu_devices(3))
with tf.device("/CPU:2"):
    print(tf.constant(1).device[-5:])
print(mgpu.set_logical_cpu_devices(3))
try:
    mgpu.set_logical_cpu_devices(2)
except mgpu.DeviceError as error:
    print(error)
"""
    lines = run_python(code).splitlines()
    three = ["/CPU:0", "/CPU:1", "/CPU:2"]
    assert lines[0] == f"{three[:2]} {three} {three}"
    assert lines[1] == "CPU:2"
    assert lines[2] == str(three)
    assert re.search(
        r"set_logical_cpu_devices\(2\).*already started with 3 CPU devices: /CPU:0, /CPU:1, /CPU:2\..*"
        r"Restart Python and call mgpu.set_logical_cpu_devices\(2\) first",
        lines[3],
    )


def test_one_logical_cpu_device_is_there_without_asking():
    code = "import mgpu, tensorflow as tf; tf.constant(1); print(mgpu.set_logical_cpu_devices(1))"
    assert run_python(code) == "['/CPU:0']"
