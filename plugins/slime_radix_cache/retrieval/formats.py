"""Formats of answers: JSON by default; msgpack, npz and safetensors for long answers.

Where JSON has a list with an entry for each token, or base64 of such values, the other formats have an array:

==================  =======  =================================================
``tokens``          ``<i4``
``loss_mask``       ``|i1``
``rollout_logp``    ``<f8``  NaN where JSON has null; left out if not wanted
``version_index``   ``<i4``  index into ``version_names``, -1 where the mask is 0
``routed_experts``  any     ``|u1``, ``<u2`` or ``<i4``: the narrowest that fits; left out if not wanted or not exact
``indexer_topk``    any     as ``routed_experts``
==================  =======  =================================================

``version_index`` and the list ``version_names`` (an entry is null where the engine named no version) replace JSON's
``generation_versions``.

An npz has all other fields as JSON in the array of bytes ``about``; a safetensors file has them in its metadata. The
npz of a session joins the arrays of its trajectories: trajectory ``i`` is ``offsets[i]`` to ``offsets[i + 1]``
(``<i8``). In the same way, ``experts_offsets`` and ``indexer_offsets`` give the places of ``routed_experts`` and
``indexer_topk``. A safetensors file of a session has an array ``NAME.i`` for each trajectory ``i``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import numpy.typing as npt
import orjson

from slime_radix_cache.retrieval.answer import PROMPT, Answer, Record
from slime_radix_cache.retrieval.base64_rows import rows_as_text
from slime_radix_cache.retrieval.npz import zipped
from slime_radix_cache.retrieval.token_rows import ROWS, about_rows
from slime_rows.body_pieces import Piece
from slime_rows.members import Member
from slime_rows.rows import Rows
from slime_rows.safetensors_file import safetensors_file

__all__ = ["JSON", "MSGPACK", "NPZ", "SAFETENSORS", "Format", "format_for"]

_Arrays = dict[str, npt.NDArray[Any] | Rows]
#: Head of binary data in msgpack, with its length.
_BIN_32 = struct.Struct(">BI")
_BIN_32_CODE = 0xC6


@dataclass(frozen=True, slots=True)
class Format:
    """A format of answers. ``one`` encodes an answer; ``many`` encodes a session's fields and all its answers.

    Both make each piece when it is needed. Rows are read and encoded in the order in which they are in the body.
    """

    media_type: str
    one: Callable[[Answer], Iterator[Piece]]
    many: Callable[[Mapping[str, Any], Sequence[Answer]], Iterator[Piece]]


def _json(answer: Answer) -> Iterator[Piece]:
    record = answer.record
    document = {
        **answer.about,
        "tokens": record.tokens,
        "loss_mask": _repeated((b"0," if version == PROMPT else b"1,", n) for version, n in record.spans),
        "generation_versions": _repeated((orjson.dumps(version) + b",", n) for version, n in record.spans),
    }
    if answer.logprobs:
        document["rollout_logp"] = _logprobs(record)
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not answer.rows:
        yield text
        return
    yield text[:-1]
    for rows in answer.rows:
        yield b"," + orjson.dumps(about_rows(rows))[1:-1] + b',"%b":' % rows.name.encode()
        yield from rows_as_text(rows, answer.row_form) if rows.found is not None else (b"null",)
    yield b"}"


def _repeated(runs: Iterable[tuple[bytes, int]]) -> orjson.Fragment:
    """Return a JSON list from runs of equal entries. Each run is encoded once, which is four times as fast."""
    return orjson.Fragment(b"[" + b"".join(text * count for text, count in runs)[:-1] + b"]")


def _logprobs(record: Record) -> orjson.Fragment:
    parts = []
    position = 0
    for version, count in record.spans:
        end = position + count
        if version == PROMPT:
            parts.append(b"0.0," * count)
        elif count:
            values = orjson.dumps(record.logprobs[position:end], option=orjson.OPT_SERIALIZE_NUMPY)
            parts.append(values[1:-1] + b",")
        position = end
    return orjson.Fragment(b"[" + b"".join(parts)[:-1] + b"]")


def _json_many(about: Mapping[str, Any], answers: Sequence[Answer]) -> Iterator[Piece]:
    # One answer at a time: orjson holds the GIL during each call.
    yield orjson.dumps({**about, "trajectories": []})[:-2]
    for number, answer in enumerate(answers):
        if number:
            yield b","
        yield from _json(answer)
    yield b"]}"


def _arrays(answer: Answer, names: dict[Any, int]) -> _Arrays:
    """Return the arrays of ``answer``, and add its versions to ``names``, which numbers them."""
    record = answer.record
    numbers = [
        PROMPT if version == PROMPT else names.setdefault(version, len(names)) for version, _ in record.spans
    ]
    arrays: _Arrays = {
        "tokens": record.tokens.astype("<i4", copy=False),
        "loss_mask": record.loss_mask,
        "version_index": np.repeat(np.array(numbers, "<i4"), [count for _, count in record.spans]),
    }
    if answer.logprobs:
        arrays["rollout_logp"] = record.logprobs.astype("<f8", copy=False)
    return arrays | {each.name: each for each in answer.rows if each.found is not None}


def _about(answer: Answer) -> dict[str, Any]:
    """Return the fields of ``answer`` that are no arrays."""
    about = dict(answer.about)
    for rows in answer.rows:
        about |= about_rows(rows)
    return about


def _msgpack(answer: Answer) -> Iterator[Piece]:
    names: dict[Any, int] = {}
    arrays = _arrays(answer, names)
    yield _map_begun({**_about(answer), "version_names": list(names)}, len(arrays))
    for name, array in arrays.items():
        member = Member(name, [array])
        head = _map_begun({"dtype": member.dtype.str}, 1) + _packed("data")
        yield _packed(name) + head + _BIN_32.pack(_BIN_32_CODE, member.nbytes)
        yield from member.pieces()


def _msgpack_many(about: Mapping[str, Any], answers: Sequence[Answer]) -> Iterator[Piece]:
    yield _map_begun(about, 1) + _packed("trajectories")
    yield msgpack.Packer().pack_array_header(len(answers))
    for answer in answers:
        yield from _msgpack(answer)


def _map_begun(fields: Mapping[str, Any], more: int) -> bytes:
    """Return the beginning of a msgpack map: its head and ``fields``; ``more`` further fields must follow."""
    head: bytes = msgpack.Packer().pack_map_header(len(fields) + more)
    return b"".join((head, *map(_packed, chain.from_iterable(fields.items()))))


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _npz(answer: Answer) -> Iterator[Piece]:
    names: dict[Any, int] = {}
    members = [Member(name, [array]) for name, array in _arrays(answer, names).items()]
    return zipped({**_about(answer), "version_names": list(names)}, members)


def _npz_many(about: Mapping[str, Any], answers: Sequence[Answer]) -> Iterator[Piece]:
    names: dict[Any, int] = {}
    each = [_arrays(answer, names) for answer in answers]
    members = [Member(name, [one[name] for one in each]) for name in each[0] if name not in ROWS]
    members.append(_offsets("offsets", [len(answer.record.tokens) for answer in answers]))
    for name, fields in ROWS.items():
        if found := [one[name] for one in each if name in one]:
            members.append(Member(name, found))
            lengths = [Member(name, [one[name]]).shape[0] if name in one else 0 for one in each]
            members.append(_offsets(fields.offsets, lengths))
    document = {**about, "version_names": list(names), "trajectories": [_about(answer) for answer in answers]}
    return zipped(document, members)


def _offsets(name: str, lengths: Sequence[int]) -> Member:
    return Member(name, [np.cumsum([0, *lengths], dtype="<i8")])


def _safetensors(answer: Answer) -> Iterator[Piece]:
    names: dict[Any, int] = {}
    members = [Member(name, [array]) for name, array in _arrays(answer, names).items()]
    return safetensors_file(members, _metadata({**_about(answer), "version_names": list(names)}))


def _safetensors_many(about: Mapping[str, Any], answers: Sequence[Answer]) -> Iterator[Piece]:
    names: dict[Any, int] = {}
    each = [_arrays(answer, names) for answer in answers]
    members = [Member(f"{name}.{number}", [one[name]]) for number, one in enumerate(each) for name in one]
    document = {**about, "version_names": list(names), "trajectories": [_about(answer) for answer in answers]}
    return safetensors_file(members, _metadata(document))


def _metadata(about: Mapping[str, Any]) -> dict[str, str]:
    return {"about": orjson.dumps(about).decode()}


JSON = Format("application/json", _json, _json_many)
MSGPACK = Format("application/x-msgpack", _msgpack, _msgpack_many)
NPZ = Format("application/octet-stream", _npz, _npz_many)
SAFETENSORS = Format("application/x-safetensors", _safetensors, _safetensors_many)

_BY_TYPE = {format.media_type: format for format in (JSON, MSGPACK, NPZ, SAFETENSORS)}


def format_for(accept: str) -> Format:
    """Return the format that an ``Accept`` header prefers; JSON if it names none."""
    if (named := _BY_TYPE.get(accept)) is not None:
        return named  # most clients send only the media type
    best, highest = JSON, 0.0
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        format = _BY_TYPE.get(kind)
        if format is not None and (quality := _quality(parameters)) > highest:
            best, highest = format, quality
    return best


def _quality(parameters: Sequence[str]) -> float:
    """Return the quality value (RFC 9110, section 12.4.2); 0 if it is malformed."""
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
