"""Files with several arrays, made piece by piece: NumPy's npz, and safetensors.

An npz is a zip of files in NumPy's format, without compression. The checksum of a member stands behind it (zip's *data
descriptor*), so that no member has to be in memory as a whole. Readers that begin with zip's directory, at the end of
the file, need nothing else; ``numpy.load`` and ``zipfile`` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
import orjson
from numpy.lib import format as npy

from slime_radix_cache.retrieval.members import Data, Member, Piece

__all__ = ["npy_head", "safetensors_file", "zipped"]

_TENSOR_TYPES = {"|i1": "I8", "|u1": "U8", "<u2": "U16", "<i4": "I32", "<i8": "I64", "<f8": "F64"}


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
    text = np.frombuffer(orjson.dumps(about), np.uint8)  # a string array would lose a NUL at its end
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


def safetensors_file(about: Mapping[str, Any], members: Sequence[Member]) -> Iterator[Piece]:
    """Yield a safetensors file with ``members``, and ``about`` as JSON in its metadata."""
    # Wide values first, so that each tensor begins at a multiple of its values' size.
    members = sorted(members, key=lambda member: -member.dtype.itemsize)
    head: dict[str, Any] = {"__metadata__": {"about": orjson.dumps(about).decode()}}
    place = 0
    for member in members:
        begin, place = place, place + member.nbytes
        kind = _TENSOR_TYPES[member.dtype.str]
        head[member.name] = {"dtype": kind, "shape": member.shape, "data_offsets": (begin, place)}
    text = orjson.dumps(head)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for member in members:
        yield from member.pieces()
