"""Bodies of ``/generate`` answers: their media type, and their JSON without routed experts."""

from __future__ import annotations

from typing import Any

import orjson

from router_core.reply import Reply

__all__ = ["EVENTS", "EXPERTS", "JSON", "media_type", "parsed", "without_experts"]

JSON, EVENTS = b"application/json", b"text/event-stream"

#: In JSON this cannot stand inside a string: there the quotes would be escaped.
EXPERTS = b'"routed_experts":'
#: Smaller bodies are parsed as they are: with experts a body is large.
_LARGE = 1 << 16


def media_type(reply: Reply) -> bytes:
    """Return the media type of ``reply``, in lower case and without parameters."""
    return (reply.header(b"content-type") or b"").partition(b";")[0].strip().lower()


def parsed(body: bytes) -> Any:
    """Parse ``body`` as JSON, without the values of ``routed_experts`` if it is large: 64 MiB of them take 0.1 s.

    Raises orjson.JSONDecodeError.
    """
    return orjson.loads(without_experts(body) if len(body) > _LARGE else body)


def without_experts(body: bytes) -> bytes:
    """Return ``body`` with empty strings as the values of ``routed_experts``."""
    kept: list[bytes] = []
    position = 0
    while (name := body.find(EXPERTS, position)) >= 0:
        value = name + len(EXPERTS)
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
