import collections
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mgpu.errors import DeviceError, StagingError
from mgpu.staging import StagingArea

HERE = "/CPU:0"
ROWS = tf.TensorSpec([None, 2], tf.float32)
SHORT_S = 0.3


def rows(*values):
    """Return a (len(values), 2) float32 batch whose rows hold their value."""
    return np.repeat(np.float32(values)[:, None], 2, axis=1)


def traced(function):
    """Trace `function` and drop the operation that a put returns: a tf.function cannot return one."""

    def body(*args):
        result = function(*args)
        return None if isinstance(result, tf.Operation) else result

    return tf.function(body)


@pytest.fixture
def far():
    """Name the last device: one that TensorFlow does not choose by itself."""
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        pytest.skip("needs two logical CPU devices")
    return f"/CPU:{len(devices) - 1}"


def test_batches_come_out_in_the_order_they_went_in():
    with StagingArea(ROWS, HERE, depth=3) as area:
        batches = [rows(0, 1, 2), rows(3), rows(4, 5)]  # the sizes differ, as at the end of an epoch
        for batch in batches:
            area.put(batch)
        for batch in batches:
            np.testing.assert_array_equal(area.get(), batch)


def test_size_and_bytes_follow_the_batches():
    with StagingArea(ROWS, HERE, depth=2) as area:
        seen = [(int(area.size()), area.nbytes())]
        for batch in (rows(0), rows(1, 2)):
            area.put(batch)
            seen.append((int(area.size()), area.nbytes()))
        area.get()
        seen.append((int(area.size()), area.nbytes()))
        area.clear()
        seen.append((int(area.size()), area.nbytes()))
        assert seen == [(0, 0), (1, 8), (2, 24), (1, 16), (0, 0)]
        assert area.size().dtype == tf.int32


class QueueModel(RuleBasedStateMachine):
    """Whatever is done to an area, it answers as a plain Python queue of the same depth."""

    value = 0.0

    @initialize(depth=st.integers(1, 3))
    def make(self, depth):
        spec = {"x": ROWS, "id": tf.TensorSpec([None], tf.string)}
        self.depth, self.model = depth, collections.deque()
        self.area = StagingArea(spec, HERE, depth, timeout_s=0)

    @rule(num=st.integers(0, 3), now=st.booleans())
    def put(self, num, now):
        self.value += 1
        x = rows(*[self.value] * num)
        batch = {"x": x, "id": np.array([b"%d" % self.value] * num, dtype=object)}
        put = self.area.put_now if now else self.area.put
        if len(self.model) < self.depth:
            put(batch)
            self.model.append(batch)
        else:
            with pytest.raises(StagingError, match=rf"no room.*batches in it: {self.depth}"):
                put(batch)

    @rule(now=st.booleans())
    def get(self, now):
        get = self.area.get_now if now else self.area.get
        if self.model:
            self.same(get(), self.model.popleft())
        else:
            with pytest.raises(StagingError, match=r"too few batches.*batches in it: 0"):
                get()

    @rule(index=st.integers(0, 2), now=st.booleans())
    def peek(self, index, now):
        peek = self.area.peek_now if now else self.area.peek
        if index < len(self.model):
            self.same(peek(index), self.model[index])
        else:
            with pytest.raises(StagingError, match=r"peek(_now)?\("):
                peek(index)

    @precondition(lambda self: self.model)
    @rule()
    def clear(self):
        self.area.clear()
        self.model.clear()

    @invariant()
    def holds_what_the_queue_holds(self):
        if hasattr(self, "area"):
            assert int(self.area.size()) == len(self.model)
            ids = sum(len(i) for batch in self.model for i in batch["id"])
            assert self.area.nbytes() == sum(batch["x"].nbytes for batch in self.model) + ids

    def same(self, found, expected):
        np.testing.assert_array_equal(found["x"], expected["x"])
        np.testing.assert_array_equal(found["id"].numpy(), expected["id"])

    def teardown(self):
        if hasattr(self, "area"):
            self.area.close()


QueueModel.TestCase.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, derandomize=True, database=None
)
test_an_area_is_a_queue = QueueModel.TestCase


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "string"],
)
def test_every_dtype_comes_back_unchanged(dtype):
    value = tf.constant([b"a", b""]) if dtype == "string" else tf.cast([1, 0], dtype)
    with StagingArea(tf.TensorSpec([None], dtype), HERE) as area:
        area.put(value)
        found = area.get()
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found.numpy(), value.numpy())


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_structure_and_none_come_back():
    spec = {"b": [ROWS, None], "a": (tf.TensorSpec([], tf.int64), Pair(ROWS, {"z": None, "y": ROWS}))}
    batch = {"a": (7, Pair(rows(1), {"y": rows(2), "z": None})), "b": [rows(3), None]}
    with StagingArea(spec, HERE) as area:
        area.put(batch)
        found = area.get()
    tf.nest.assert_same_structure(found, batch)
    assert isinstance(found["a"][1], Pair)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(batch), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)


def test_ragged_and_sparse_batches_come_back():
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    words = tf.ragged.constant([["a"], ["b", "c"]])
    sparse = tf.sparse.from_dense([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    spec = {
        "ragged": tf.RaggedTensorSpec([None, None], tf.int64),
        "sparse": tf.SparseTensorSpec([None, 3], tf.float32),
        "words": tf.RaggedTensorSpec([None, None], tf.string),
    }
    with StagingArea(spec, HERE) as area:
        area.put({"ragged": ragged, "sparse": sparse, "words": words})
        found = area.get()
    assert found["ragged"].to_list() == [[1, 2], [], [3]]
    assert found["words"].to_list() == [[b"a"], [b"b", b"c"]]
    np.testing.assert_array_equal(tf.sparse.to_dense(found["sparse"]), [[0, 1, 0], [2, 0, 0]])


def test_variants_wait_on_the_host(far):
    with StagingArea(tf.TensorSpec([], tf.variant), far) as area:
        area.put(tf.data.experimental.to_variant(tf.data.Dataset.range(3)))
        dataset = tf.data.experimental.from_variant(area.get(), tf.TensorSpec([], tf.int64))
        assert [int(i) for i in dataset] == [0, 1, 2]


def test_a_staged_batch_does_not_change_with_the_array_it_came_from():
    batch, variable = rows(1), tf.Variable(rows(1))
    with StagingArea((ROWS, ROWS), HERE) as area:
        area.put((batch, variable))
        batch[:] = 9
        variable.assign(rows(9))
        for found in area.get():
            np.testing.assert_array_equal(found, rows(1))


def test_batches_live_on_the_device_and_strings_on_the_host(far):
    with StagingArea({"x": ROWS, "id": tf.TensorSpec([None], tf.string)}, far) as area:
        assert area.device == far
        area.put({"x": rows(1), "id": ["a"]})
        for found in (area.peek(), area.get()):
            assert found["x"].device.endswith(f"device:{far[1:]}")
            assert found["id"].device.endswith("device:CPU:0")


def test_traced_ops_are_placed_on_the_device_also_inside_another_device_scope(far):
    with StagingArea({"x": ROWS, "id": tf.TensorSpec([None], tf.string)}, far) as area:

        @tf.function
        def step(x, ids):
            with tf.device("/CPU:1"):
                area.put({"x": x, "id": ids})
                area.peek()
                area.get()
                return area.size()

        graph = step.get_concrete_function(ROWS, tf.TensorSpec([None], tf.string)).graph
        places = collections.Counter()
        for op in graph.get_operations():
            if op.type in {"Stage", "Unstage", "StagePeek"}:
                strings = tf.string in [t.dtype for t in (*op.inputs, *op.outputs)]
                places[op.type, op.device[-5:], "string" if strings else "float"] += 1
        assert places == {
            (kind, place, what): 1
            for kind in ("Stage", "Unstage", "StagePeek")
            for place, what in (("CPU:0", "string"), (far[1:], "float"))
        }


def test_one_area_serves_eager_and_traced_calls_alike(far):
    """A buffer of its own for the traced ops would be empty here."""
    with StagingArea(ROWS, far, depth=2, timeout_s=SHORT_S) as area:
        get, put = traced(area.get), traced(area.put)
        area.put(rows(1))
        put(tf.constant(rows(2, 2)))
        assert int(area.size()) == int(tf.function(area.size)()) == 2
        np.testing.assert_array_equal(tf.function(area.peek)(1), rows(2, 2))
        np.testing.assert_array_equal(get(), rows(1))
        np.testing.assert_array_equal(area.get(), rows(2, 2))


def test_traced_batches_keep_the_static_shapes_of_the_spec():
    shapes = []
    spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([4], tf.string))
    with StagingArea(spec, HERE) as area:

        @tf.function
        def get():
            x, ids = area.get()
            shapes.append((x.shape.as_list(), ids.shape.as_list()))
            return x

        area.put((tf.ones([2, 3]), ["a"] * 4))
        assert get().shape == (2, 3)
    assert shapes == [([None, 3], [4])]


@pytest.mark.parametrize("now", [True, False], ids=["now", "waiting"])
def test_one_step_gets_batch_k_and_puts_batch_k_plus_1(far, now):
    """Filled before, drained after; uneven batches; one trace."""
    batches = [rows(0, 1, 2), rows(3, 4, 5), rows(6)]
    with StagingArea(ROWS, far, timeout_s=SHORT_S) as area:

        @tf.function(input_signature=[ROWS])
        def step(following):
            batch = area.get_now() if now else area.get()
            put = area.put_now(following) if now else area.put(following)
            assert isinstance(put, tf.Operation)
            return batch

        area.put(batches[0])
        got = []
        for following in batches[1:]:
            got.append(step(following).numpy())
            assert int(area.size()) == 1
        got.append(area.get().numpy())
        assert int(area.size()) == 0
    for found, expected in zip(got, batches, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_traced_loop_passes_every_batch_through():
    with StagingArea(tf.TensorSpec([], tf.int32), HERE, timeout_s=SHORT_S) as area:

        @tf.function
        def total():
            result = 0
            for i in tf.range(10):
                area.put(i)
                result = 10 * result + area.get()
            return result

        assert int(total()) == 123456789


def test_areas_of_one_name_do_not_mix():
    with StagingArea(ROWS, HERE, name="a") as one, StagingArea(ROWS, HERE, name="a") as other:
        one.put(rows(1))
        assert (int(one.size()), int(other.size())) == (1, 0)
        other.put(rows(2))
        np.testing.assert_array_equal(one.get(), rows(1))
        np.testing.assert_array_equal(other.get(), rows(2))


@pytest.mark.parametrize("wrap", [lambda f: f, traced], ids=["eager", "traced"])
def test_get_waits_for_a_put_from_another_thread(wrap):
    with StagingArea(ROWS, HERE, timeout_s=20) as area:
        timer = threading.Timer(SHORT_S, area.put, [rows(5)])
        get = wrap(area.get)
        timer.start()
        np.testing.assert_array_equal(get(), rows(5))
        timer.join()


@pytest.mark.parametrize("wrap", [lambda f: f, traced], ids=["eager", "traced"])
def test_put_waits_for_a_get_from_another_thread(wrap):
    with StagingArea(ROWS, HERE, timeout_s=20) as area:
        area.put(rows(1))
        taken = []
        timer = threading.Timer(SHORT_S, lambda: taken.append(area.get().numpy()))
        put = wrap(area.put)
        timer.start()
        put(rows(2))
        timer.join()
        np.testing.assert_array_equal(taken[0], rows(1))
        np.testing.assert_array_equal(area.get(), rows(2))


def test_a_producer_thread_feeds_every_batch_once_and_never_overfills():
    with StagingArea(tf.TensorSpec([], tf.int64), HERE, depth=2, timeout_s=20) as area:
        producer = threading.Thread(target=lambda: [area.put(i) for i in range(40)])
        producer.start()
        got = []
        for _ in range(40):
            assert int(area.size()) <= 2
            got.append(int(area.get()))
        producer.join()
    assert got == list(range(40))


def test_two_consumers_share_the_batches_without_hanging():
    """Looking and taking apart would leave one thread blocked in TensorFlow for ever."""
    with StagingArea(tf.TensorSpec([], tf.int64), HERE, depth=1, timeout_s=20) as area:
        got = []
        threads = [
            threading.Thread(target=lambda: [got.append(int(area.get())) for _ in range(20)], daemon=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for i in range(40):
            area.put(i)
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert sorted(got) == list(range(40))


def test_close_ends_a_wait():
    area = StagingArea(ROWS, HERE, timeout_s=20)
    timer = threading.Timer(SHORT_S, area.close)
    timer.start()
    with pytest.raises(StagingError, match=r"get\(\) was called, but the area is closed"):
        area.get()
    timer.join()


def test_clear_empties_both_stores_and_the_area_stays_usable():
    with StagingArea((ROWS, tf.TensorSpec([None], tf.string)), HERE, depth=2) as area:
        for clear in (area.clear, traced(area.clear)):
            area.put((rows(1), ["old"]))
            area.put((rows(1), ["old"]))
            clear()
            assert int(area.size()) == 0
            area.put((rows(2), ["new"]))
            assert area.get()[1].numpy().tolist() == [b"new"]


@pytest.mark.parametrize(
    ("call", "cause", "remedy"),
    [
        pytest.param(
            lambda area: [area.put(rows(1)), area.put(rows(1))],
            r"put\(\) found no room within 0.3 s; batches in it: 1\.",
            r"make the area with depth=2\.",
            id="full",
        ),
        pytest.param(
            lambda area: area.get(),
            r"get\(\) found too few batches within 0.3 s; batches in it: 0\.",
            r"Call put\(\) once before each get\(\), or raise timeout_s",
            id="empty",
        ),
        pytest.param(
            lambda area: area.peek(),
            r"peek\(0\) found too few batches within 0.3 s; batches in it: 0\.",
            r"Call put\(\)",
            id="peek",
        ),
    ],
)
def test_an_eager_wait_ends_with_a_reason(call, cause, remedy):
    with StagingArea(ROWS, HERE, timeout_s=SHORT_S, name="mine") as area:
        start_s = time.monotonic()
        with pytest.raises(StagingError, match=rf"'mine' on /CPU:0 \(depth 1\): {cause}.*{remedy}"):
            call(area)
        assert SHORT_S <= time.monotonic() - start_s < 20 * SHORT_S


def test_a_traced_wait_ends_with_a_reason_and_changes_nothing():
    with StagingArea(ROWS, HERE, timeout_s=SHORT_S) as area:
        get, put = traced(area.get), traced(area.put)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)get\(\) found too few.*Call put"):
            get()
        put(tf.constant(rows(1)))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)put\(\) found no room.*depth=2.*1"):
            put(tf.constant(rows(2)))
        assert int(area.size()) == 1
        np.testing.assert_array_equal(get(), rows(1))


def test_eager_calls_that_do_not_wait_refuse_at_once():
    with StagingArea(ROWS, HERE, timeout_s=1000) as area:
        with pytest.raises(StagingError, match=r"get_now\(\) found too few batches; .* 0\..*get\(\)\.$"):
            area.get_now()
        area.put_now(rows(1))
        with pytest.raises(StagingError, match=r"put_now\(\) found no room; batches in it: 1"):
            area.put_now(rows(2))


RAGGED = tf.RaggedTensorSpec([None, None], tf.int64)
NESTED = {"x": [ROWS, None], "y": tf.TensorSpec([None], tf.int32)}


@pytest.mark.parametrize(
    ("spec", "batch", "message"),
    [
        pytest.param(
            ROWS,
            np.ones((1, 2)),
            r"batch.*shape \(1, 2\), float64.*Put tf.cast\(batch, tf.float32\)",
            id="dtype",
        ),
        pytest.param(ROWS, np.ones((1, 3), "float32"), r"batch.*shape \(1, 3\).*Make the area with", id="static-dim"),
        pytest.param(ROWS, np.ones(2, "float32"), r"batch.*shape \(2,\), float32", id="rank"),
        pytest.param(ROWS, [[1.0, "a"]], r"batch.*found a list", id="unreadable"),
        pytest.param(ROWS, None, r"batch.*found None", id="none"),
        pytest.param(ROWS, {"x": rows(1)}, r"batch.*found a dict with the keys \['x'\]", id="dict-for-tensor"),
        pytest.param(ROWS, tf.sparse.from_dense(rows(1)), r"batch.*found SparseTensor", id="sparse-for-dense"),
        pytest.param(
            tf.TensorSpec([None], tf.string),
            np.ones(2, "float32"),
            r"batch.*Make the area with TensorSpec\(.*float32",
            id="no-cast",
        ),
        pytest.param(
            NESTED,
            {"x": [rows(1), None]},
            r"batch.*a dict with the keys \['x', 'y'\]; found",
            id="key-missing",
        ),
        pytest.param(NESTED, {"x": [rows(1)], "y": [1]}, r"batch\['x'\]: a list of length 2", id="length"),
        pytest.param(NESTED, {"x": (rows(1), None), "y": [1]}, r"batch.*a list of length 2; found a tuple", id="tuple"),
        pytest.param(NESTED, {"x": [rows(1), 3], "y": [1]}, r"batch\['x'\]\[1\]: None; found int 3", id="not-none"),
        pytest.param(
            NESTED,
            {"x": [rows(1), None], "y": np.array([1])},
            r"batch\['y'\]: .*int64.*Put tf.cast\(batch\['y'\], tf.int32\)",
            id="nested-dtype",
        ),
        pytest.param(RAGGED, tf.ragged.constant([[1.0]]), r"batch.*found RaggedTensor", id="ragged-dtype"),
        pytest.param(RAGGED, np.array([[1]]), r"batch.*found ndarray", id="not-ragged"),
        pytest.param(
            tf.SparseTensorSpec([None, 3], tf.float32),
            tf.sparse.from_dense(rows(1)),
            r"batch.*found SparseTensor",
            id="sparse-shape",
        ),
    ],
)
def test_a_batch_that_does_not_match_is_refused_before_anything_is_staged(spec, batch, message):
    with StagingArea(spec, HERE) as area:
        for put in (area.put, area.put_now):
            with pytest.raises(StagingError, match=rf"put\(\) takes at {message}.*Nothing was staged"):
                put(batch)
            assert int(area.size()) == 0
        with pytest.raises(StagingError, match=message):
            tf.function(lambda: [area.put(batch), 0][1], autograph=False)()
        assert int(area.size()) == 0


@pytest.mark.parametrize("index", [-1, 2, True, 0.0, "0"])
def test_an_index_that_can_never_be_there_is_refused(index):
    with StagingArea(ROWS, HERE, depth=2, timeout_s=1000) as area:
        with pytest.raises(StagingError, match=r"from 0 \(the oldest\) to 1.*Call peek\(1\)"):
            area.peek(index)
        with pytest.raises(StagingError, match=r"Call peek_now\(1\)"):
            area.peek_now(index)


CALLS = {
    "put": lambda area: area.put(rows(1)),
    "put_now": lambda area: area.put_now(rows(1)),
    "get": lambda area: area.get(),
    "get_now": lambda area: area.get_now(),
    "peek": lambda area: area.peek(),
    "peek_now": lambda area: area.peek_now(),
    "size": lambda area: area.size(),
    "nbytes": lambda area: area.nbytes(),
    "clear": lambda area: area.clear(),
    "with": lambda area: area.__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_area_says_so(call):
    area = StagingArea(ROWS, HERE, timeout_s=1000)
    area.put(rows(1))
    area.close()
    area.close()
    with pytest.raises(StagingError, match=rf"{call}.*is closed.*Make a new StagingArea\(spec, device\)"):
        CALLS[call](area)


def test_leaving_the_block_frees_the_batches_also_after_an_error():
    sizes = []

    def fail():
        with StagingArea(ROWS, HERE) as area:
            size = tf.function(area.size)
            area.put(rows(1))
            sizes.extend([size, int(size())])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    size, before = sizes
    assert (before, int(size())) == (1, 0)  # traced before, so it still looks into the buffer


def test_bytes_are_not_known_while_tracing():
    message = r"nbytes\(\) while a tf.function is traced.*size\(\) gives the number"
    with StagingArea(ROWS, HERE) as area, pytest.raises(StagingError, match=message):
        tf.function(lambda: tf.constant(area.nbytes()), autograph=False)()


@pytest.mark.parametrize("depth", [0, -1, True, 1.0, None])
def test_a_depth_below_one_is_refused(depth):
    with pytest.raises(StagingError, match=rf"depth={depth!r}\).*integer of 1 or more.*pass depth=1"):
        StagingArea(ROWS, HERE, depth)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), None, True, "60"])
def test_a_timeout_that_is_no_duration_is_refused(timeout_s):
    with pytest.raises(StagingError, match=rf"timeout_s={timeout_s!r}\).*Pass timeout_s=60.0"):
        StagingArea(ROWS, HERE, timeout_s=timeout_s)


@pytest.mark.parametrize("device", ["/GPU:99", "cpu", "/CPU:99", "", 0, None, ["/CPU:0"]])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(DeviceError) as error:
        StagingArea(ROWS, device)
    text = str(error.value)
    assert text.startswith(f"StagingArea(device={device!r}) is not a device of this process, which has: ")
    offered = text.split('device="')[1].split('"')[0]
    StagingArea(ROWS, offered).close()


def test_a_device_may_be_spelled_in_every_usual_way():
    for device in ("cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"):
        with StagingArea(ROWS, device) as area:
            assert area.device == "/CPU:0"


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        pytest.param(None, "no spec at all", id="none"),
        pytest.param([], "no spec at all", id="empty"),
        pytest.param(rows(1), r"ndarray of shape \(1, 2\), float32", id="a-batch"),
        pytest.param({"x": (None, 3)}, "int 3", id="a-shape"),
    ],
)
def test_what_is_no_spec_is_refused(spec, found):
    with pytest.raises(StagingError, match=rf"must be a structure of tf.TypeSpec; found {found} in it"):
        StagingArea(spec, HERE)
