"""Faults of requests and answers that another author's code has changed, in words for the log."""

from __future__ import annotations

import re

__all__ = ["IN_VALUES", "TOKEN", "UnsendableRequest", "UnwritableBody", "reply_fault", "request_fault"]

#: The name of a header, and a method: a token, RFC 9110 section 5.6.2.
TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
#: Bytes allowed in the value of a header, RFC 9110 section 5.5.
IN_VALUES = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
_TARGET = re.compile(rb"[^\x00-\x20]+")
_STATUSES = range(100, 1000)


class UnsendableRequest(Exception):
    """An error for a request to a worker that code in the router's process has broken; the message says how."""


class UnwritableBody(TypeError):
    """An error for a value, given as the body of a request, that JSON cannot hold."""


def request_fault(method: object, target: object, headers: object) -> str | None:
    """Return the reason why a request with these parts cannot be sent; None: it can be sent."""
    if not (isinstance(method, str) and method.isascii() and TOKEN.fullmatch(method.encode())):
        return f"the method is {method!r}; wanted the name of a method as str"
    if not isinstance(target, bytes):
        return f"the target is a {type(target).__name__}; wanted bytes"
    if not _TARGET.fullmatch(target):
        return "the target is empty, or has a space or a control character; write such characters as %XX"
    return _header_fault(headers)


def reply_fault(status: object, headers: object) -> str | None:
    """Return the reason why an answer with these parts cannot be sent; None: it can be sent."""
    if not (isinstance(status, int) and status in _STATUSES):
        return f"the status is {status!r}; wanted an int of three digits"
    return _header_fault(headers)


def _header_fault(headers: object) -> str | None:
    """Return the fault of the first header that cannot be sent. The value may be a secret, and is left out."""
    every: list[object] = headers if isinstance(headers, list) else [headers]
    wrong = [pair for pair in every if not _is_header(pair)]
    if not wrong:
        return None
    shown = type(wrong[0]).__name__
    if isinstance(wrong[0], tuple) and len(wrong[0]) == 2:
        shown = f"{wrong[0][0]!r}: {type(wrong[0][1]).__name__}"
    return (
        f"a header is {shown}; wanted a list of pairs of bytes, without line breaks and other control characters,"
        " and names without spaces"
    )


def _is_header(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    name, value = pair
    if not (isinstance(name, bytes) and isinstance(value, bytes)):
        return False
    return TOKEN.fullmatch(name) is not None and not value.translate(None, IN_VALUES)
