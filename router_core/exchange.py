"""One request and its reply, as plugins see them: bytes first, JSON on demand."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import orjson

from router_core.errors import BadRequest, WorkerBroke
from router_core.types import Headers

if TYPE_CHECKING:
    from types import TracebackType

    from router_core.workers import Worker

__all__ = ["BodySource", "Exchange", "Reply", "Request", "Tap"]

logger = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")
_UNREAD = object()
_LARGE = 1 << 16
#: The beginning of a JSON object, and what comes first in it.
_OBJECT = re.compile(rb"([ \t\r\n]*\{[ \t\r\n]*)(.?)", re.DOTALL)


class BodySource(Protocol):
    """Where the bytes of a streamed reply come from."""

    @property
    def finished(self) -> bool:
        """True once :meth:`read` has returned the last piece."""
        ...

    async def read(self) -> bytes:
        """The next piece, or ``b""`` at the end. Raises HTTPError when the worker breaks off."""
        ...

    def close(self) -> None:
        """Give up what is left. Idempotent."""
        ...


class Tap(Protocol):
    """Watches a reply's bytes on their way to the client."""

    def feed(self, chunk: bytes) -> None:
        """Called with each piece before it is passed on: what a client was told is already known here."""
        ...

    def close(self, complete: bool) -> None:
        """Called once, however the reply ends; ``complete`` is false when its end was never seen."""
        ...


class Request:
    """What the client asked for, and what the worker will be sent.

    ``target`` is path and query as on the wire; ``headers`` keep order and duplicates.
    """

    __slots__ = ("_body", "_json", "_stale", "headers", "method", "target")

    def __init__(self, method: str, target: bytes, headers: Headers, body: bytes = b"") -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self._body = body
        self._json: Any = _UNREAD
        self._stale = False

    @property
    def path(self) -> str:
        """Path without query, percent-decoded."""
        return unquote(self.target.partition(b"?")[0].decode("ascii", "replace"))

    @property
    def body(self) -> bytes:
        """The bytes that go to the worker; encoded again only after :meth:`replace_json`."""
        if self._stale:
            self._body = orjson.dumps(self._json, option=orjson.OPT_SERIALIZE_NUMPY)
            self._stale = False
        return self._body

    def json(self) -> Any:
        """The body as JSON, parsed once. Treat it as read-only; an edit goes through :meth:`replace_json`.

        Raises BadRequest.
        """
        if self._json is _UNREAD:
            try:
                self._json = orjson.loads(self._body)
            except orjson.JSONDecodeError as error:
                raise BadRequest(f"the body is not JSON: {error}") from None
        return self._json

    def replace_json(self, value: Any) -> None:
        """Send ``value`` instead. Several plugins may do so; it is encoded once, and its length is set.

        It may hold numpy arrays, which :meth:`json` then returns to later plugins.
        """
        self._json = value
        self._stale = True

    def add_field(self, field: bytes) -> None:
        """Add a top-level ``field`` that the body, a JSON object, does not have: ``b'"stream":true'``.

        What is there stays byte for byte, and nothing is parsed. Raises BadRequest.
        """
        body = self._body
        if self._json is not _UNREAD:
            if isinstance(self._json, dict):
                self._json = {**orjson.loads(b"{%b}" % field), **self._json}
            if self._stale:
                return
        if body[:2] == b'{"' and len(body) < _LARGE:
            self._body = b"{%b,%b" % (field, body[1:])
            return
        start = _OBJECT.match(body)
        if start is None:
            raise BadRequest("wanted a JSON object as the body")
        comma = b"" if start[2] == b"}" else b","
        rest = memoryview(body)[start.end(1) :]  # one copy of what may be large, not two
        self._body = b"".join((start[1], field, comma, rest))

    def header(self, name: bytes) -> bytes | None:
        """The first value of header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Reply:
    """What the client gets: whole (``bytes``) or a stream that is passed on as it comes."""

    __slots__ = ("_body", "_ended", "_source", "_taps", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: bytes | BodySource = b"") -> None:
        self.status = status
        self.headers = headers
        self._taps: list[Tap] = []
        self._ended = False
        self._body: bytes | None
        self._source: BodySource | None
        if isinstance(body, bytes):
            self._body, self._source = body, None
        else:
            self._body, self._source = None, body

    @classmethod
    def from_json(cls, value: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
        """A whole JSON reply."""
        return cls(status, [_JSON, *headers], orjson.dumps(value))

    @property
    def body(self) -> bytes | None:
        """The whole body, or None while the reply is a stream that nobody has read."""
        return self._body

    @property
    def arrived(self) -> bool:
        """True when all of the body is surely here: nothing can break any more."""
        return self._source is None or getattr(self._source, "complete", False)

    def header(self, name: bytes) -> bytes | None:
        """The first value of header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The whole body; the reply is a whole one from now on.

        Raises WorkerBroke past ``max_bytes``, and what :meth:`BodySource.read` raises.
        """
        if self._body is None:
            assert self._source is not None  # narrowing: a reply has one of the two
            whole = BytesIO()  # grows in place, where a list of pieces would be joined into a second copy
            while piece := await self._source.read():
                whole.write(piece)
                if max_bytes is not None and whole.tell() > max_bytes:
                    raise WorkerBroke(
                        f"a worker's reply is larger than the {max_bytes} bytes that a plugin takes"
                    )
            self._body = whole.getvalue()
            self._source = None
        return self._body

    def replace_body(self, body: bytes | BodySource) -> None:
        """Send ``body`` instead of what there is. A length that was stated is dropped; the proxy states its own."""
        self.headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        if isinstance(body, bytes):
            self._close_source()
            self._body, self._source = body, None
        else:
            self._body, self._source = None, body

    def pass_through(self, wrap: Callable[[BodySource], BodySource]) -> None:
        """Send what ``wrap`` makes of the stream, and closes with it. Does nothing when the reply is a whole one."""
        if self._source is not None:
            self.replace_body(wrap(self._source))

    def tap(self, tap: Tap) -> None:
        """Let ``tap`` watch the bytes that go to the client."""
        self._taps.append(tap)

    async def next_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, shown to the taps first, and whether it is the last one.

        Raises what :meth:`BodySource.read` raises.
        """
        if self._body is not None:
            piece, last = self._body, True
        else:
            source = self._source
            assert source is not None  # narrowing: a reply has one of the two
            piece = await source.read()
            last = source.finished or not piece
        if self._taps:
            if piece:
                self._show(piece)
            if last:
                self._end(True)
        return piece, last

    def _show(self, piece: bytes) -> None:
        for tap in self._taps:
            tap.feed(piece)

    def _end(self, complete: bool) -> None:
        if not self._ended:
            self._ended = True
            failed: Exception | None = None
            for tap in self._taps:
                try:
                    tap.close(complete)
                except Exception as error:
                    logger.exception("a tap failed at the end of its reply")
                    failed = failed or error
            if failed is not None and complete:
                raise failed  # nothing of the end was sent yet: the client must not think that all is well

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    def close(self) -> None:
        """Give up what was not passed on. Idempotent."""
        self._close_source()
        self._end(False)


class Exchange:
    """One request on its way through the hooks; ``with`` it, so that the worker's count comes back.

    ``session`` is that of the request unless it is given (a string, or None for none). ``asked`` is the client's
    exchange, for which a plugin made this one.
    ``worker`` is the worker whose lease is held, ``reply`` what the client will get, ``notes`` a place for
    plugins to keep what they know about this request (key: the plugin's own name). ``gone``: the client has hung up
    or aborted it, and nothing new is to be begun for it. ``suits`` says which workers may be asked, or raises an
    HTTPError, where a plugin limits that: set it before one is chosen. What is made for this exchange begins with it.
    """

    __slots__ = (
        "_closed", "_on_close", "_parts", "_reply", "_session", "asked", "gone", "notes", "request", "suits", "worker"
    )  # fmt: skip

    def __init__(self, request: Request, *, session: object = _UNREAD, asked: Exchange | None = None) -> None:
        self.request = request
        self.asked = asked
        self._parts: list[Exchange] = []
        if asked is not None:
            asked._parts.append(self)
        self._reply: Reply | None = None
        self.worker: Worker | None = None
        self.gone: bool = asked is not None and asked.gone
        self.suits: Callable[[Worker], bool] | None = asked.suits if asked is not None else None
        self.notes: dict[str, Any] = {}
        self._session = session
        self._on_close: list[Callable[[], object]] = []
        self._closed = False

    @property
    def reply(self) -> Reply | None:
        """What the client will get. One that is put in its place ends the other: its taps, its connection."""
        return self._reply

    @reply.setter
    def reply(self, reply: Reply | None) -> None:
        replaced, self._reply = self._reply, reply
        if replaced is not None and replaced is not reply:
            replaced.close()

    @property
    def session(self) -> str | None:
        """Session of the conversation: ``X-Session-Id``, else ``X-SMG-Routing-Key``, else body ``session_id``."""
        if self._session is _UNREAD:
            self._session = self._find_session()
        return self._session  # type: ignore[return-value]  # _UNREAD is gone now

    def _find_session(self) -> str | None:
        request = self.request
        routing_key = None
        for name, value in request.headers:
            if name == b"x-session-id" and value:
                return value.decode("latin-1")
            if name == b"x-smg-routing-key" and value and routing_key is None:
                routing_key = value.decode("latin-1")
        if routing_key is not None:
            return routing_key
        if b'"session_id"' in request.body:  # a look at the bytes is cheaper than parsing each body
            try:
                document = request.json()
            except BadRequest:
                return None  # the worker says so in its own words
            if isinstance(document, dict):
                named = document.get("session_id")
                return named if isinstance(named, str) and named else None
        return None

    def lease(self, worker: Worker) -> None:
        """Count this request on ``worker`` until the exchange ends or leases another one."""
        self.release()
        worker.in_flight += 1
        self.worker = worker

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        if self.worker is not None:
            self.worker.in_flight -= 1
            self.worker = None

    def may_go_to(self, worker: Worker) -> bool:
        """Whether ``worker`` may be asked for it."""
        return self.suits is None or self.suits(worker)

    @property
    def workers(self) -> list[Worker]:
        """The workers that this one, and those made for it, are with now."""
        return [each.worker for each in self.all_parts() if each.worker is not None]

    def all_parts(self) -> Iterator[Exchange]:
        """This one, and those that plugins have made for it."""
        yield self
        for part in self._parts:
            yield from part.all_parts()

    def hang_up(self) -> list[Exchange]:
        """The client has gone. Returns this one, and those made for it, as far as they are with a worker."""
        everything = list(self.all_parts())
        for each in everything:
            each.gone = True
        return [each for each in everything if each.worker is not None]

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once when the exchange ends, however it ends."""
        self._on_close.append(callback)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: the upstream connection is closed if bytes are left, the lease comes back. Idempotent.

        It holds nothing afterwards: what plugins keep in it often leads back to it, and a body must not wait
        for the garbage collector.
        """
        if self._closed:
            return
        self._closed = True
        self.release()
        if self.reply is not None:
            self.reply.close()
        for callback in self._on_close:
            try:
                callback()
            except Exception:
                logger.exception("a plugin's on_close failed")
        self._on_close.clear()
        self._parts.clear()
        self.asked = self.suits = None
        self.notes.clear()
        self._reply = None
