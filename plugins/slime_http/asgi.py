"""Types of ASGI and HTTP that all modules share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import BuiltinMethodType, MethodType
from typing import Any

__all__ = [
    "EXPLAIN",
    "FAILED",
    "ASGIApp",
    "Headers",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "SendNow",
    "note_failure",
    "send_now_of",
    "send_whole",
    "take_whole",
]

#: Key in the ASGI state. Its value is a function: given an exception that the application raised, the function returns
#: the HTTPError to answer with.
EXPLAIN = "slime_http.explain"
#: Key in the ASGI state. Its value is the code of the error that ended an answer after its head was sent.
FAILED = "slime_http.failed"

#: Types of bound methods; the second is that of compiled classes. A layer may wrap ``send`` in an object that delegates
#: the attributes, ``__self__`` included: the layer must be called then.
_METHODS = (MethodType, BuiltinMethodType)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
#: Takes a piece of a streamed body at once, if it can: see ``ServerRequest.send_now``.
SendNow = Callable[[Any, Iterable[Callable[[bytes], object]]], bool]

#: Names of headers in lower case, and their values as on the wire. The order and duplicates are kept.
Headers = list[tuple[bytes, bytes]]


def note_failure(scope: Scope, code: str) -> None:
    """Note that the answer to ``scope`` failed after its head was sent. Only the first ``code`` is kept."""
    scope.setdefault("state", {}).setdefault(FAILED, code)


def send_now_of(send: Send) -> SendNow | None:
    """Return the ``send_now`` of the object that the method ``send`` is bound to, or None if there is none."""
    method: Any = send
    found: SendNow | None = getattr(method.__self__, "send_now", None) if type(send) in _METHODS else None
    return found


def take_whole(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the whole body of a request. None: :func:`receive` must be called, as for a body that is still coming.

    The router's own server gives a body that has come at once, which saves two coroutines for the ASGI message.
    """
    method: Any = receive
    at_once = getattr(method.__self__, "take_whole", None) if type(receive) in _METHODS else None
    found: bytes | None = at_once(max_bytes) if at_once is not None else None
    return found


def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> Awaitable[None] | None:
    """Send a whole answer by ``send``. Returns None if it is sent, else an awaitable that sends it.

    The router's own server takes a whole answer in one call, which saves two coroutines for the ASGI messages.
    """
    method: Any = send
    at_once = getattr(method.__self__, "send_whole", None) if type(send) in _METHODS else None
    if at_once is not None and at_once(status, headers, body):
        return None
    return _send_messages(send, status, headers, body)


async def _send_messages(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
