"""Sends one call to many workers at once, and collects each worker's answer. Equal bodies share one buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import orjson

from router_core import Worker
from router_core.errors import BadRequest, WorkerBroke, WorkerTimeout, WorkerUnreachable
from router_core.types import Headers
from router_core.workers import auth_headers
from slime_control.calls.endpoints import Call
from slime_sglang.documents import document_in

__all__ = ["CONNECTIONS", "Answer", "FanOut", "json_in", "passed_on"]

#: Limit for reading a worker's answer. If an answer is not a JSON object, only its first characters are shown.
_MAX_ANSWER_BYTES = 1 << 20
_SHOWN_CHARACTERS = 500
#: A large body is sent in pieces of this size, so that a connection needs memory for one piece, not for a whole body.
_PIECE_BYTES = 1 << 18
#: Headers that the router sets for each worker, or that concern the client's connection (RFC 9110 section 7.6.1).
_OWN = frozenset(
    (
        b"accept-encoding", b"connection", b"content-length", b"content_length", b"expect", b"host", b"keep-alive",
        b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
        b"transfer_encoding", b"upgrade",
    )
)  # fmt: skip
_QUESTION_S = 10.0
_IDENTITY = (b"accept-encoding", b"identity")


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer. ``status``: the HTTP status; 502 or 504 if no answer came.

    ``trouble``: the reason for a failure, or None after a success. ``reached``: False when the call surely did not
    reach the worker.
    """

    status: int
    content: dict[str, Any]
    trouble: str | None
    reached: bool = True

    @property
    def is_as_before(self) -> bool:
        """True when the worker surely kept its weights: it was not reached, or answered 4xx without ``success``."""
        return not self.reached or (400 <= self.status < 500 and "success" not in self.content)

    def as_dict(self) -> dict[str, Any]:
        """Return what the caller gets. ``status`` is the HTTP status, even if the engine's JSON has a ``status``."""
        told = {"error": self.trouble} if self.trouble is not None else {}
        return {**told, **self.content, "status": self.status}


#: No keep-alive: a worker may close an idle connection while a call is sent on it, and no call may be repeated.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class FanOut:
    """Sends control calls over its own connections, apart from proxied requests.

    ``timeout_s``: the deadline of a worker's whole answer.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, timeout_s: float, connect_s: float) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            transport=transport,
            timeout=httpx.Timeout(None, connect=connect_s),
        )

    async def __aenter__(self) -> FanOut:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(
        self,
        call: Call,
        method: str,
        target: bytes,
        headers: Headers,
        bodies: Mapping[Worker, bytes],
        on_answer: Callable[[Worker, Answer], None],
    ) -> None:
        """Send ``call`` to all workers of ``bodies`` at once; ``on_answer`` gets each answer as it comes.

        ``headers``: the result of :func:`passed_on`.
        """

        async def one(worker: Worker, body: bytes) -> None:
            on_answer(worker, await self._ask(call, method, worker, target, headers, body))

        async with anyio.create_task_group() as tasks:
            for worker, body in bodies.items():
                tasks.start_soon(one, worker, body)

    async def _ask(
        self, call: Call, method: str, worker: Worker, target: bytes, headers: Headers, body: bytes
    ) -> Answer:
        own = [_IDENTITY]
        if body or method == "POST":
            own.append((b"content-length", b"%d" % len(body)))
        content = _pieces(body) if body else None
        try:
            with anyio.fail_after(self._timeout_s):
                status, raw = await self._exchange(method, worker, target, [*headers, *own], content)
        except TimeoutError:
            return Answer(504, {}, f"no answer within {self._timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Answer(502, {}, f"{type(error).__name__}: {error}", reached=False)
        except (
            Exception
        ) as error:  # uvloop and httpcore raise other types when a connection is reset while it opens
            return Answer(502, {}, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        return _judged(call, status, raw)

    async def _exchange(
        self,
        method: str,
        worker: Worker,
        target: bytes,
        headers: Headers,
        content: AsyncIterator[bytes] | None,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> tuple[int, bytes]:
        """Return status and body. Reading stops when the body is longer than ``max_bytes``."""
        if not any(name == b"authorization" for name, _ in headers):
            key = auth_headers(worker).items()
            headers = [*headers, *((name.encode("ascii"), value.encode("ascii")) for name, value in key)]
        raw = bytearray()
        exactly = {"target": target}  # httpx would quote the query of a URL again
        async with self._http.stream(
            method, worker.url, headers=headers, content=content, extensions=exactly
        ) as answer:
            async for chunk in answer.aiter_raw():
                raw += chunk
                if len(raw) > max_bytes:
                    break
        return answer.status_code, bytes(raw)

    async def question(self, worker: Worker, *paths: bytes) -> dict[str, Any]:
        """Return the JSON object at the first of ``paths`` that ``worker`` knows; an empty dict if none comes."""
        try:
            with anyio.fail_after(min(_QUESTION_S, self._timeout_s)):
                for path in paths:
                    status, raw = await self._exchange("GET", worker, path, [_IDENTITY], None)
                    if status != 404:
                        break
        except Exception:
            return {}
        return (document_in(raw) if status == 200 else None) or {}

    async def fetch(
        self, worker: Worker, *paths: str, timeout_s: float = _QUESTION_S, max_bytes: int = _MAX_ANSWER_BYTES
    ) -> bytes:
        """Get the first of ``paths`` that ``worker`` knows; returns the body.

        Raises WorkerUnreachable, WorkerTimeout, and WorkerBroke for an answer that is no 2xx or too large.
        """
        try:
            with anyio.fail_after(timeout_s):
                for path in paths:
                    status, raw = await self._exchange(
                        "GET", worker, path.encode("ascii"), [_IDENTITY], None, max_bytes
                    )
                    if status != 404:
                        break
        except TimeoutError:
            raise WorkerTimeout(f"no answer within {timeout_s:g} s") from None
        except Exception as error:  # see _ask
            raise WorkerUnreachable(f"{type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise WorkerBroke(f"it answered {path} with {status}")
        if len(raw) > max_bytes:
            raise WorkerBroke(f"its answer to {path} is larger than {max_bytes} bytes")
        return raw


def passed_on(headers: Headers) -> Headers:
    """Return the client's ``headers`` except those in ``_OWN`` and those that Connection names. Raises BadRequest."""
    own = set(_OWN)
    for name, value in headers:
        if name == b"connection":
            own.update(token.strip().lower() for token in value.split(b","))
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise BadRequest(f"Transfer-Encoding: wanted chunked, got {value[:80].decode('latin-1')}")
    # White space around a value is not part of the value (RFC 9110 section 5.5). httpx would refuse such a value, and
    # show it in the error, although it may be a key.
    return [(name, value.strip(b" \t")) for name, value in headers if name not in own]


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    if len(body) <= _PIECE_BYTES:
        yield body
        return
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


def _judged(call: Call, status: int, raw: bytes) -> Answer:
    document = json_in(raw)
    if isinstance(document, dict):
        content = document
    else:
        text = raw[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").strip()[:_SHOWN_CHARACTERS]
        content = {"message": text} if text else {}
    trouble = None
    if not 200 <= status < 300:
        trouble = f"it answered {status}"
    elif content.get("success") is False:
        trouble = "it says that it did not succeed"
    elif call.confirmed and content.get("success") is not True:
        trouble = "it does not say that it succeeded"
    return Answer(status, content, trouble)


def json_in(raw: bytes) -> Any:
    """Parse ``raw``; None when it is not JSON that can be passed on."""
    try:
        document = orjson.loads(raw)
        orjson.dumps(document)  # dumps allows less depth than loads
    except (ValueError, TypeError):
        return None
    return document
