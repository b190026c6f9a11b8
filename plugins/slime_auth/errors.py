"""The error for bodies of web pages. It lies outside of the compiled modules, where it would lose its ``status``."""

from __future__ import annotations

from router_core.errors import HTTPError

__all__ = ["UnsupportedMediaType"]


class UnsupportedMediaType(HTTPError):
    """The path takes no body of this ``Content-Type``."""

    status, type, code = 415, "invalid_request_error", "UNSUPPORTED_MEDIA_TYPE"
