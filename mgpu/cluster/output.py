"""Decides which rank wrote what, from the marks that `mpirun` puts before each piece of output."""

import re

# Open MPI: job and rank. Version 5 adds a space of its own; version 4 doesn't, so that there a space is the rank's.
_MARKS = {
    ("Open MPI", 4): re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr)>:"),
    ("Open MPI", 5): re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr)>: ?"),
    ("MPICH", 0): re.compile(rb"<mgpu-rank-(\d+)>"),
}
# What may be the beginning of a mark whose rest is still to come.
_BEGUN = re.compile(rb"(?:\[\d*,?\d*\]?<?[a-z]*>?:?|<[a-z-]*\d*>?)\Z")


class Splitter:
    """Takes the output of `mpirun` piece by piece and gives it to the ranks that wrote it.

    A rank that writes half a line is marked in the middle of the line, and pieces of two ranks may then follow each
    other on one; every rank's own text comes out whole.

    Args:
        kind, major: of the MPI whose `mpirun` it is.
    """

    def __init__(self, kind: str, major: int) -> None:
        self._mark = _MARKS[(kind, min(max(major, 4), 5)) if kind == "Open MPI" else ("MPICH", 0)]
        self._rank: int | None = None
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int | None, bytes]]:
        """Return pairs of a rank, or None for mpirun itself, and what it wrote."""
        data = self._rest + data
        begun = _BEGUN.search(data, max(0, len(data) - 48))
        # A whole mark at the end is kept too where a space that belongs to it may follow.
        keep = begun.start() if begun is not None and begun.group() else len(data)
        data, self._rest = data[:keep], data[keep:]
        return self._split(data)

    def close(self) -> list[tuple[int | None, bytes]]:
        """Return what was kept back for a mark that did not come."""
        data, self._rest = self._rest, b""
        return self._split(data)

    def _split(self, data: bytes) -> list[tuple[int | None, bytes]]:
        pieces: list[tuple[int | None, bytes]] = []
        position = 0
        for match in self._mark.finditer(data):
            pieces += self._unmarked(data[position : match.start()])
            self._rank = int(match[1])
            position = match.end()
        pieces += self._unmarked(data[position:])
        return pieces

    def _unmarked(self, text: bytes) -> list[tuple[int | None, bytes]]:
        """Give `text` to the rank of the last mark, up to the end of its line: each line of a rank has a mark."""
        line, newline, rest = text.partition(b"\n")
        pieces = [(self._rank, line + newline)]
        if newline:
            self._rank = None
            pieces.append((None, rest))
        return [piece for piece in pieces if piece[1]]
