import sys

import pytest

from mgpu.cluster.hosts import expand, with_slots
from mgpu.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("h1", ["h1"]),
        ("h2, h1", ["h2", "h1"]),
        ("a,rack[1-2]n[08-09]", ["a", "rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_slurms_node_lists_are_expanded(text, names):
    pytest.importorskip("hostlist")
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1:2,h2:1", [("h1", 2), ("h2", 1)]),
        ("h[1,3]:4,login", [("h1", 4), ("h3", 4), ("login", None)]),
    ],
)
def test_a_host_may_say_how_many_ranks_it_takes(text, hosts):
    pytest.importorskip("hostlist")
    assert with_slots(text) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "node[01-03",
            r"'node\[01-03' cannot be read: unbalanced brackets.*like node1,node2 or node\[01-03,07\]",
        ),
        ("node01-03]", r"cannot be read: unbalanced brackets"),
        ("node[3-1]", r"cannot be read: start > stop"),
        ("node[a-b]", r"cannot be read: bad range"),
        ("", r"The list of hosts '' has a name that no host has: ''.*a variable that was empty"),
        ("a,,b", r"no host has: ''"),
        ("a b", r"no host has: 'a b'"),
        ("[]", r"The list of hosts '\[\]' "),
    ],
)
def test_a_malformed_list_is_refused(text, message):
    pytest.importorskip("hostlist")
    with pytest.raises(LaunchError, match=message):
        expand(text)


@pytest.mark.parametrize("text", ["h1:0", "h1:two", "h1:", "h1:-1"])
def test_a_number_of_ranks_that_is_none_is_refused(text):
    with pytest.raises(LaunchError, match=r"no number above zero\. Write, for example, h1:2"):
        with_slots(text)


def test_only_brackets_need_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "hostlist", None)  # makes `import hostlist` fail
    assert expand("h1,h2") == ["h1", "h2"]
    with pytest.raises(LaunchError, match=r"python-hostlist, which reads them, is not installed.*'mgpu\[mpi\]'"):
        expand("h[1-2]")
