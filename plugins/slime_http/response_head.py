"""Heads of answers, made from ASGI's status and headers, and complete error answers."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

import orjson

from slime_http.message_faults import IN_VALUES, TOKEN

__all__ = ["error_answer", "response_lines"]

_STATUS_LINES = {int(one): f"HTTP/1.1 {int(one)} {one.phrase}\r\n".encode() for one in HTTPStatus}
_KNOWN_NAMES = frozenset(
    b"cache-control connection content-encoding content-length content-type date server transfer-encoding"
    b" vary x-request-id".split()
)


def response_lines(status: int, headers: Iterable[Iterable[bytes]]) -> tuple[bytes, int | None, bool]:
    """Return the lines of a head, its Content-Length or None, and True when it has ``Connection: close``.

    Transfer-Encoding is left out, since the server decides on it. Raises RuntimeError, TypeError and ValueError for
    headers that cannot be sent.
    """
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    length = None
    closes = False
    for name, value in headers:
        name = name.lower()
        if name not in _KNOWN_NAMES and not TOKEN.fullmatch(name):
            raise RuntimeError(f"{name!r} cannot be the name of a header")
        if name == b"content-length":
            if length is not None or not value.isdigit():
                raise RuntimeError(f"wanted one number as Content-Length, got {value!r}")
            length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise RuntimeError(f"wanted chunked as Transfer-Encoding, got {value!r}")
            continue
        elif name == b"connection" and b"close" in map(bytes.strip, value.lower().split(b",")):
            closes = True
        lines += (name, b": ", value, b"\r\n")
    head = b"".join(lines)
    # One check of all values: without the bytes that values may have, only the line breaks are left.
    if len(head.translate(None, IN_VALUES)) != (len(lines) + 3) // 2:
        name = next(name for name, value in headers if value.translate(None, IN_VALUES))
        raise RuntimeError(f"the value of the header {name!r} has a control character in it")
    return head, length, closes


def error_answer(status: int, message: str, *, to_head: bool = False, body: bytes | None = None) -> bytes:
    """Return a complete answer with an error as JSON and ``Connection: close``.

    ``to_head``: the answer is for a HEAD request, so its body is left out. ``body``: the JSON; by default it is made
    from ``message``.
    """
    kind = "invalid_request_error" if status < 500 else "internal_error"
    if body is None:
        body = orjson.dumps({"error": {"message": message, "type": kind, "code": f"HTTP_{status}"}})
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return _STATUS_LINES[status] + head.encode() + (b"" if to_head else body)
