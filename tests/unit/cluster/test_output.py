"""Pieces recorded from Open MPI 4.1.4 and 5.0.11 and MPICH 5.0.2."""

import pytest

from mgpu.cluster.output import Splitter


def texts(splitter, pieces):
    """Return what each rank wrote, after feeding `pieces`."""
    out = {}
    for piece in pieces:
        for rank, text in splitter.feed(piece):
            out[rank] = out.get(rank, b"") + text
    for rank, text in splitter.close():
        out[rank] = out.get(rank, b"") + text
    return out


OPEN_MPI_4 = (
    b"[1,0]<stdout>:half[1,1]<stdout>:line 0 of 1\n[1,1]<stdout>:line 1\n[1,0]<stdout>: whole\n[1,0]<stdout>:\n"
    b"[1,0]<stderr>:err[1,1]<stderr>:err 1\n[1,0]<stderr>: [1,0]<stderr>:0[1,0]<stderr>:\n"
    b"-----\nmpirun noticed\n-----\n"
)
OPEN_MPI_5 = (
    b"[1,1]<stdout>: line 0\n[1,0]<stdout>:  two spaces\n[1,1]<stdout>: \n[1,0]<stdout>: end\n---\nprterun noticed\n"
)
MPICH = b"<mgpu-rank-0>half<mgpu-rank-1>line 0\n<mgpu-rank-1>line 1\n<mgpu-rank-0> whole\n\n= BAD TERMINATION\n"
CASES = [
    pytest.param(
        ("Open MPI", 4),
        OPEN_MPI_4,
        {
            0: b"half whole\n\nerr 0\n",
            1: b"line 0 of 1\nline 1\nerr 1\n",
            None: b"-----\nmpirun noticed\n-----\n",
        },
        id="open-mpi-4",
    ),
    pytest.param(
        ("Open MPI", 5),
        OPEN_MPI_5,
        {0: b" two spaces\nend\n", 1: b"line 0\n\n", None: b"---\nprterun noticed\n"},
        id="open-mpi-5",
    ),
    pytest.param(
        ("MPICH", 5),
        MPICH,
        {0: b"half whole\n", 1: b"line 0\nline 1\n", None: b"\n= BAD TERMINATION\n"},
        id="mpich",
    ),
]


@pytest.mark.parametrize(("mpi", "data", "wanted"), CASES)
def test_each_rank_gets_its_own_text(mpi, data, wanted):
    assert texts(Splitter(*mpi), [data]) == wanted


@pytest.mark.parametrize(("mpi", "data", "wanted"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_a_mark_may_come_in_several_pieces(mpi, data, wanted, size):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert texts(Splitter(*mpi), pieces) == wanted


@pytest.mark.parametrize(
    "text", [b"1/20 [=====>...]\n", b"[1, 2, 3] < 4\n", b"[[1,0],\n", b"a[1", b"<b>x</b>\n", "täglich [ü]\n".encode()]
)
def test_brackets_in_the_output_are_no_marks(text):
    assert texts(Splitter("Open MPI", 4), [b"[1,3]<stdout>:" + text]) == {3: text}


def test_a_progress_bar_without_an_end_of_line_is_shown_at_once():
    splitter = Splitter("Open MPI", 4)
    assert splitter.feed(b"[1,0]<stdout>:\r10/20 [====") == [(0, b"\r10/20 [====")]
