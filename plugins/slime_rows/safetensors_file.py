"""Safetensors files, made piece by piece: https://huggingface.co/docs/safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from slime_rows.body_pieces import BodyLength, Piece
from slime_rows.members import Member

__all__ = ["safetensors_file"]

_TENSOR_TYPES = {"|i1": "I8", "|u1": "U8", "<u2": "U16", "<i4": "I32", "<i8": "I64", "<f8": "F64"}


def safetensors_file(members: Iterable[Member], metadata: Mapping[str, str] | None = None) -> Iterator[Piece]:
    """Yield the pieces of a safetensors file with ``members`` and ``metadata``. The first piece is a BodyLength.

    Members are sorted by the size of one value, largest first, so that each tensor begins at a multiple of that size.
    Members with the same size of a value stay in their order.
    """
    members = sorted(members, key=lambda member: -member.dtype.itemsize)
    head: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    place = 0
    for member in members:
        begin, place = place, place + member.nbytes
        kind = _TENSOR_TYPES[member.dtype.str]
        head[member.name] = {"dtype": kind, "shape": member.shape, "data_offsets": (begin, place)}
    text = orjson.dumps(head)
    text += b" " * (-len(text) % 8)
    yield BodyLength(8 + len(text) + place)
    yield len(text).to_bytes(8, "little") + text
    for member in members:
        yield from member.pieces()
