"""Recognition of requests that generate, and changes of the fields in their bodies."""

from __future__ import annotations

import re
from collections.abc import Collection

import orjson

from router_core.errors import BadRequest
from router_core.request import Request
from router_core.routes import parsed_object

__all__ = ["GENERATION_PATHS", "TOKENISED", "at_generation", "generates", "with_fields", "without_fields"]

#: Raw paths at which engines generate. Requests to them wait during a pause, are limited, and may be repeated.
GENERATION_PATHS = frozenset(
    (
        b"/generate", b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages",
        b"/invocations", b"/vertex_generate", b"/api/chat", b"/api/generate",
    )
)  # fmt: skip
#: Key in ``exchange.notes`` of a plugin's own generation whose ``input_ids`` the router has tokenised.
TOKENISED = "sglang.tokenised"
_PATHS = frozenset(path.decode() for path in GENERATION_PATHS)
_SPACE = b" \t\r\n"
_EMPTY = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*\}[ \t\r\n]*")
_NAME = re.compile(rb'"([a-z_]+)":')


def generates(request: Request) -> bool:
    """Return True when ``request`` makes an engine generate. SGLang generates for ``PUT /generate``, too."""
    if request.method == "POST":
        # Fast path: the target almost always is one of these paths as written.
        return request.target in GENERATION_PATHS or at_generation(request)
    return request.method == "PUT" and request.path == "/generate"


def at_generation(request: Request) -> bool:
    """Return True when ``request``, of any method, goes to a path at which engines generate."""
    return request.path in _PATHS


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Return ``body``, a JSON object, with ``fields`` (``b'"a":1,"b":2'``) in place of its fields of the same names.

    If none of the names occurs in ``body``, its bytes are kept and not parsed. ``fields`` come last: if a name occurs
    twice, even with escapes, JSON parsers take the last value. Raises BadRequest.
    """
    if any(b'"%b"' % name in body for name in _NAME.findall(fields)):
        return orjson.dumps({**parsed_object(body), **orjson.loads(b"{%b}" % fields)})
    end = len(body.rstrip(_SPACE)) - 1
    if end < 1 or body[end : end + 1] != b"}":
        raise BadRequest("wanted a JSON object as the body")
    comma = b"" if _EMPTY.fullmatch(body) else b","
    return b"".join((memoryview(body)[:end], comma, fields, b"}"))


def without_fields(body: bytes, names: Collection[str]) -> bytes:
    """Return ``body`` without the top-level fields ``names``; unchanged if it has no such field. Raises BadRequest.

    ``body`` is parsed only when one of the names occurs in it.
    """
    if not any(f'"{name}"'.encode() in body for name in names):
        return body
    document = parsed_object(body)
    left = {name: value for name, value in document.items() if name not in names}
    return body if len(left) == len(document) else orjson.dumps(left)
