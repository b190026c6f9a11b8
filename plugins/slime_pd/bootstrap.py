"""Bootstrap fields that connect two workers: the prefill worker's host and port, and a room for each sequence."""

from __future__ import annotations

import random
import re
from array import array
from typing import Any
from urllib.parse import urlsplit

import orjson

from router_core import Worker
from slime_sglang.facts import bootstrap_port

__all__ = ["bootstrap_fields", "may_be_many", "sequences"]

#: Fields that may ask for many sequences. Inside a JSON string the quotes would be escaped.
_MAYBE_MANY = re.compile(rb'"(?:(?:text|prompt|input_embeds)"\s*:\s*\[|input_ids"\s*:\s*\[\s*\[|n"\s*:)')
#: The largest number of rooms in a list. It is limited, since a short body with a huge ``n`` may ask for any number of
#: sequences. For more sequences, only one room is sent, and SGLang counts up from this room.
_MANY = 1 << 14


def may_be_many(body: bytes) -> bool:
    """Return False when ``body`` certainly asks for one sequence. Then the body need not be parsed."""
    return _MAYBE_MANY.search(body) is not None


def bootstrap_fields(count: int | None, prefill: Worker) -> bytes:
    """Return the bootstrap fields in JSON: lists for a batch of ``count`` sequences.

    If ``count`` is None or above ``_MANY``, the fields have single values.
    """
    host = urlsplit(prefill.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = bootstrap_port(prefill)
    each: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": _room()}
    if count is not None and count <= _MANY:
        rooms = [_room() for _ in range(count)]
        each = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    return orjson.dumps(each)[1:-1]


def _room() -> int:
    return random.getrandbits(63)


def sequences(document: Any, path: str) -> int | None:
    """Count the sequences that the batch in ``document`` asks for; None if it is no batch.

    As in SGLang (``GenerateReqInput``), the count is prompts times ``n``. ``n`` above 1 makes a single prompt a batch.
    """
    if not isinstance(document, dict):
        return None
    prompts = _prompts(document)
    place: Any = document
    if path == "/generate":
        place = document.get("sampling_params")
        if isinstance(place, list) and place:
            place = place[0]
    n = place.get("n") if isinstance(place, dict) else None
    copies = n if isinstance(n, int) and n > 1 else 1
    return (prompts or 1) * copies if prompts is not None or copies > 1 else None


def _prompts(document: dict[str, Any]) -> int | None:
    """Return the length of a list of prompts; None for a single prompt, which may be a list of ids or of vectors."""
    for name, levels in (("text", 0), ("input_ids", 1), ("input_embeds", 2), ("prompt", 1)):
        value = document.get(name)
        if not isinstance(value, list) or not value:
            continue
        inner: Any = value
        for _ in range(levels):
            inner = inner[0] if isinstance(inner, list) and inner else inner
        many = isinstance(inner, list | array | str)
        return len(value) if many else None
    return None
