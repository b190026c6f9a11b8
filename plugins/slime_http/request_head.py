"""Conversion of a request's head from the parser to an ASGI scope (ASGI 3.0, HTTP specification 2.3)."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from slime_http.asgi import Headers, Scope

__all__ = ["connection_scope", "request_scope"]

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_FRAMING = (b"content-length", b"transfer-encoding")


def connection_scope(transport: asyncio.Transport) -> Scope:
    """Return the part of the scope that all requests of a connection share."""
    return {
        "type": "http",
        "asgi": _ASGI,
        "server": get_local_addr(transport),
        "client": get_remote_addr(transport),
        "scheme": "https" if is_ssl(transport) else "http",
        "root_path": "",
    }


def request_scope(
    connection: Scope, parser: httptools.HttpRequestParser, target: bytes, headers: Headers
) -> Scope:
    """Return the scope of a request whose head ``parser`` has read. Raises ValueError, and the parser's errors."""
    if parser.should_upgrade() and any(name in _FRAMING and value != b"0" for name, value in headers):
        # httptools takes the body for data of the other protocol: the body would be lost, or read as the next request.
        raise ValueError(
            "a request with a body may not ask for another protocol: leave out its Upgrade header"
        )
    url: Any = httptools.parse_url(target)  # Any: the stub does not say that ``query`` may be None
    raw_path = url.path
    if not raw_path.isascii():
        raise ValueError("the path has a byte that is not ASCII: write it as %XX")
    path = raw_path.decode()
    return {
        **connection,
        "http_version": parser.get_http_version(),
        "method": parser.get_method().decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": url.query or b"",
        "headers": headers,
    }
