"""The attributes of a request and its answer that the server's observers read."""

from __future__ import annotations

from slime_http.asgi import Scope

__all__ = ["ObservedRequest"]


class ObservedRequest:
    """A request and the answer to it, when both have ended.

    ``scope``: the ASGI scope. ``status``: the answer's status, or 0 without an answer. ``is_whole``: the answer
    did not break off. ``error``: the beginning of an error's body; empty if the server itself made the answer.

    Event loop times in seconds: ``began`` (the application was called), ``streamed_at`` (the first chunk was written;
    0.0 without a stream) and ``ended`` (the answer has ended, or the application returned before that).
    """

    __slots__ = ("began", "ended", "error", "is_whole", "scope", "status", "streamed_at")

    scope: Scope
    began: float
    ended: float
    streamed_at: float
    status: int
    is_whole: bool
    error: bytes
