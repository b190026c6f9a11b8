"""Requests that keep a router busy: large bodies, bodies of many small parts, and a huge ``n``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

__all__ = ["BODIES", "Body"]

_LARGE = 16_000_000
_HI = b'"sampling_params":{"max_new_tokens":1}'

#: A path, and the body of the POST to it.
Body = tuple[str, bytes]


def _repeated(before: bytes, piece: bytes, after: bytes, count: int) -> bytes:
    """Return a body with ``piece`` as each of ``count`` items of a list."""
    return before + b",".join([piece] * count) + after


def _of_ids(piece: bytes, count: int) -> Body:
    return "/generate", _repeated(b'{"input_ids":[', piece, b"],%b}" % _HI, count)


def _real_ids(part: int, after: bytes = b"") -> Body:
    """Return a body of ids with five digits, as in a real long prompt."""
    ids = random.Random(1).choices(range(10_000, 16_000), k=_LARGE // 6 // part)
    return "/generate", b'{"input_ids":[%b],%b%b}' % (",".join(map(str, ids)).encode(), _HI, after)


def _prose(size: int) -> str:
    words = "The quick brown fox jumps over the lazy dog, and does not look back. "
    return words * (size // len(words))


def _text(text: str, path: str = "/generate") -> Body:
    return path, b'{"text":%b,%b}' % (json.dumps(text).encode(), _HI)


def _chat(message: bytes, count: int = 1) -> Body:
    return "/v1/chat/completions", _repeated(b'{"messages":[', message, b'],"max_tokens":1}', count)


def _message(content: str) -> bytes:
    return json.dumps({"role": "user", "content": content}, separators=(",", ":")).encode()


#: Functions that make the bodies, by name. The size of each large body is divided by the argument.
BODIES: dict[str, Callable[[int], Body]] = {
    "100,000 id lists": lambda part: _of_ids(b"[1]", 100_000 // part),
    "300,000 texts": lambda part: (
        "/generate",
        _repeated(b'{"text":[', b'"a sample"', b"],%b}" % _HI, 300_000 // part),
    ),
    "8 million ids": lambda part: _of_ids(b"1", 8_000_000 // part),
    "ids of 5 digits": _real_ids,
    "one text": lambda part: _text(_prose(_LARGE // part)),
    "one chat message of 20 MB": lambda part: _chat(_message(_prose(20_000_000 // part))),
    "empty lists": lambda part: ("/generate", _repeated(b"[", b"[]", b"]", _LARGE // 3 // part)),
    "2 million chat messages": lambda part: _chat(_message("a"), 2_000_000 // part),
    "n = 1e9": lambda part: ("/generate", b'{"text":"Hi","sampling_params":{"n":1000000000}}'),
    "text without white space": lambda part: _text(random.Random(1).randbytes(_LARGE // 2 // part).hex()),
    "/retrieve_from_text": lambda part: _text(_prose(_LARGE // part), "/retrieve_from_text"),
    "session_id at the end": lambda part: _real_ids(part, b',"session_id":"last"'),
}
