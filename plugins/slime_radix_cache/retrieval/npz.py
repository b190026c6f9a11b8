"""NumPy's files, made piece by piece: an npz, and the head of a file with one array.

An npz is a zip of files in NumPy's format, without compression. The checksum of a member stands behind it (zip's *data
descriptor*), so that no member has to be in memory as a whole. This suffices for readers that begin with zip's
directory, at the end of the file, such as ``numpy.load`` and ``zipfile``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
import orjson
from numpy.lib import format as npy

from slime_rows.body_pieces import Data, Piece
from slime_rows.members import Member

__all__ = ["npy_head", "zipped"]


class _Sink:
    """A file that can only be written, and keeps what is written until :meth:`taken`."""

    def __init__(self) -> None:
        self._pieces: list[Data] = []

    def write(self, data: Data, /) -> int:
        """Add ``data``."""
        self._pieces.append(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing; ZipFile needs the method."""

    def close(self) -> None:
        """Do nothing; ZipFile's type asks for the method."""

    def taken(self) -> list[Data]:
        """Return what was written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces


def zipped(about: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Piece]:
    """Yield an npz with ``members``, and ``about`` as JSON in an array of bytes."""
    text = np.frombuffer(orjson.dumps(about), np.uint8)  # a string array would take four bytes a character
    sink = _Sink()
    with ZipFile(sink, "w") as archive:
        for member in (Member("about", [text]), *members):
            with archive.open(f"{member.name}.npy", "w", force_zip64=True) as file:
                yield from _written(member, file, sink)
    yield from sink.taken()


def _written(member: Member, file: IO[bytes], sink: _Sink) -> Iterator[Piece]:
    def write(data: Data) -> list[Data]:
        file.write(data)
        return sink.taken()

    yield from write(npy_head(member.dtype, member.shape))
    yield from member.pieces(write)


def npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the head of a file in NumPy's format, whose values follow in C order."""
    sink = _Sink()
    head = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    write: Any = npy.write_array_header_1_0  # not every version of NumPy annotates it
    write(sink, head)
    return b"".join(sink.taken())
