"""An engine's answer, read out of SGLang's JSON: checked once, here.

Every key may be missing: an aborted generation has next to none.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Any

import anyio
import orjson

from router_core.errors import HTTPError
from router_core.reply import Reply
from slime_radix_cache.segments import Versions, pack_logprobs

__all__ = [
    "EVENTS",
    "JSON",
    "NOTHING_SAMPLED",
    "Output",
    "Unusable",
    "media_type",
    "parsed",
    "read_output",
    "rest_of",
    "without_experts",
]

JSON, EVENTS = b"application/json", b"text/event-stream"

#: The kind of an answer without tokens that claims none.
NOTHING_SAMPLED = "nothing_sampled"

#: In JSON this cannot stand inside a string: there the quotes would be escaped.
_EXPERTS = b'"routed_experts":'
#: Bodies below are parsed as they are: experts make one large.
_LARGE = 1 << 16
#: Seconds and bytes that an engine has to say that a stream is over.
_END_S, _END_BYTES = 1.0, 1 << 16


class Unusable(Exception):
    """An answer of which nothing can be recorded. ``kind`` names why, for counting."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def media_type(reply: Reply) -> bytes:
    """Return the media type of ``reply``, in lower case and without parameters."""
    return (reply.header(b"content-type") or b"").partition(b";")[0].strip().lower()


async def rest_of(reply: Reply) -> bytes:
    """Return the bytes behind the last event of a generation, ``[DONE]``, and close ``reply``.

    One that is given up before its end is aborted at the engine, by a name that the next attempt has, too.
    """
    rest = bytearray()
    with anyio.move_on_after(_END_S):
        try:
            last = False
            while not last and len(rest) < _END_BYTES:
                piece, last = await reply.next_piece()
                rest += piece
        except HTTPError:
            pass  # all that matters has come
    reply.close()
    return bytes(rest)


def parsed(body: bytes) -> Any:
    """``body`` as JSON, the values of ``routed_experts`` left out: parsing 64 MiB of them takes 0.1 s.

    Raises orjson.JSONDecodeError.
    """
    return orjson.loads(without_experts(body) if len(body) > _LARGE else body)


def without_experts(body: bytes) -> bytes:
    """``body`` with empty strings in the place of the values of ``routed_experts``."""
    kept: list[bytes] = []
    position = 0
    while (name := body.find(_EXPERTS, position)) >= 0:
        value = name + len(_EXPERTS)
        start = body.find(b'"', value)
        if start >= 0 and not body[value:start].strip():
            kept.append(body[position : start + 1])
            position = body.find(b'"', start + 1)  # base64 has no escapes
            if position < 0:
                return body  # no JSON; the parser says so
        else:
            kept.append(body[position:value])
            position = value
    kept.append(body[position:])
    return b"".join(kept)


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled sequence. ``ids`` and ``logprobs`` are packed (see segments); ``ids`` is not empty.

    Figures that contradict each other are left out; :func:`slime_sglang.contradiction` names them.
    """

    text: str
    ids: bytes
    logprobs: bytes | None
    versions: Versions
    finish_reason: str


def read_output(output: Any) -> Output:
    """``output`` is one object of a ``/generate`` answer, parsed. Raises Unusable."""
    if not isinstance(output, dict):
        raise Unusable("answer_not_understood")
    meta = output.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    text = output.get("text")
    try:
        ids, logprobs = _tokens(output.get("output_ids"), meta.get("output_token_logprobs"))
    except (TypeError, ValueError, OverflowError, IndexError):
        raise Unusable("answer_not_understood") from None
    if not ids:
        claims_some = meta.get("completion_tokens", 0) != 0 or bool(text or meta.get("output_token_logprobs"))
        raise Unusable("answer_without_ids" if claims_some else NOTHING_SAMPLED)
    if not isinstance(text, str):
        raise Unusable("answer_without_text")
    return Output(
        text,
        ids,
        logprobs,
        _versions(meta, len(ids) // 4),
        sys.intern(orjson.dumps(meta.get("finish_reason")).decode()),
    )


def _tokens(ids: Any, triples: Any) -> tuple[bytes, bytes | None]:
    """Packed ids and logprobs from ``output_ids`` and ``[logprob, id, text]``; each may be missing."""
    if ids is None:
        ids = [triple[1] for triple in triples or ()]
    packed = array("i", ids).tobytes()
    if not triples:
        return packed, None
    try:
        logprobs = pack_logprobs([triple[0] for triple in triples])
        if [triple[1] for triple in triples] == ids:
            return packed, logprobs
    except (TypeError, LookupError):
        pass  # they are of other tokens, or no logprobs
    return packed, None


def _versions(meta: dict[str, Any], count: int) -> Versions:
    """Versions of ``count`` tokens: from spans ``[{version, start, end}]`` when they cover all; else one for all."""
    spans = meta.get("weight_versions")
    if spans:
        runs: list[tuple[str | None, int]] = []
        position = 0
        try:
            for span in spans:
                if span["start"] != position or span["end"] <= position:
                    break
                runs.append((_name(span["version"]), span["end"] - position))
                position = span["end"]
        except (TypeError, KeyError):
            position = -1
        if position == count:
            return tuple(runs)
        return ((None, count),)
    return ((_name(meta.get("weight_version")), count),)


def _name(version: Any) -> str | None:
    return sys.intern(str(version)) if version is not None else None
