"""Bodies of ``/generate`` answers: their media type, and their parsed JSON."""

from __future__ import annotations

from typing import Any

import orjson

from router_core.exchange import Exchange
from router_core.reply import Reply
from slime_sglang.array_cutter import parsed_with_arrays

__all__ = ["EVENTS", "JSON", "answer_in", "is_small", "keep_parsed", "media_type", "parsed"]

JSON, EVENTS = b"application/json", b"text/event-stream"

#: Only larger bodies are searched for token arrays: in a smaller body, an array is parsed fast enough.
_LARGE = 1 << 16
_NOTE = "sglang.parsed_answer"


def media_type(reply: Reply) -> bytes:
    """Return the media type of ``reply``, in lower case and without parameters."""
    return (reply.header(b"content-type") or b"").partition(b";")[0].strip().lower()


def is_small(body: bytes) -> bool:
    """Return True if :func:`parsed` leaves the arrays in ``body`` as they are."""
    return len(body) <= _LARGE


def parsed(body: bytes, *, keeps_arrays: bool = False) -> Any:
    """Parse ``body`` as JSON. Raises orjson.JSONDecodeError.

    Token arrays in a large body are cut out first, since orjson takes 0.1 s for 64 MiB of them. These arrays become
    ``TokenArray`` if ``keeps_arrays``, else empty strings. In a small body, arrays stay strings of base64.
    """
    return orjson.loads(body) if is_small(body) else parsed_with_arrays(body, keeps=keeps_arrays)


def keep_parsed(exchange: Exchange, body: bytes, answer: Any) -> None:
    """Let :func:`answer_in` return ``answer``, the parsed ``body`` of a reply, until ``exchange`` ends.

    Nobody may change ``answer`` any more. If ``body`` is so large that arrays may be cut out of it, this does nothing.
    """
    if is_small(body):
        exchange.notes[_NOTE] = body, answer


def answer_in(exchange: Exchange, body: bytes) -> Any:
    """Return the parsed ``body`` of a reply of ``exchange``. Raises orjson.JSONDecodeError.

    If a plugin has called :func:`keep_parsed` for this very ``body``, nothing is parsed again.
    """
    known, answer = exchange.notes.get(_NOTE, (None, None))
    return answer if known is body else orjson.loads(body)
