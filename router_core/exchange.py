"""One request with its worker and its reply, as hooks get them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeAlias

from router_core.errors import BadRequest
from router_core.reply import Reply
from router_core.request import Request
from router_core.types import Scope
from router_core.workers import Worker

__all__ = ["Exchange", "SessionSource", "check_length", "client_of", "session_named", "session_of"]

logger = logging.getLogger(__name__)

_UNREAD = object()
#: Largest size of a name in bytes. There is a limit because the router stores names, such as those of sessions.
_MAX_NAME = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

#: Finds the session of a request whose headers name no session and whose body has no ``session_id``.
SessionSource: TypeAlias = "Callable[[Request], str | None]"


class Exchange:
    """One request on its way through the hooks. Used as a context manager, it is closed at the end of the block.

    ``session``, if given, replaces the request's session, also if it is None. ``sources``: see :func:`session_of`.
    ``parent``: the client's exchange, if a plugin made this exchange for it. Then this exchange has the parent's
    ``scope``, and begins with the parent's ``client_disconnected`` and ``worker_filter``.
    ``worker``: the leased worker. ``notes``: data of plugins about this request, by plugin name.
    ``scope``: the ASGI scope of the client's request. Middleware may leave data for hooks in it.
    ``client_disconnected``: True once the client has hung up or aborted the request; then no new work may begin.
    ``worker_filter``: returns True for each eligible worker, or raises an HTTPError. A plugin sets it before a worker
    is chosen.
    """

    __slots__ = (
        "_address", "_closed", "_on_close", "_parts", "_reply", "_session", "_sources", "client_disconnected",
        "notes", "parent", "request", "scope", "worker", "worker_filter",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        *,
        session: object = _UNREAD,
        parent: Exchange | None = None,
        sources: Iterable[SessionSource] = (),
        address: str | None = None,
        scope: Scope | None = None,
    ) -> None:
        self.request = request
        self.parent = parent
        self.scope: Scope | None = scope if parent is None else parent.scope
        self._address = address
        self._parts: list[Exchange] = []
        self._reply: Reply | None = None
        self.worker: Worker | None = None
        self.client_disconnected = False
        self.worker_filter: Callable[[Worker], bool] | None = None
        self.notes: dict[str, Any] = {}
        self._session = session
        self._sources = sources
        self._on_close: list[Callable[[], object]] = []
        self._closed = False
        if parent is not None:
            parent._parts.append(self)
            self.client_disconnected = parent.client_disconnected
            self.worker_filter = parent.worker_filter

    @property
    def reply(self) -> Reply | None:
        """The reply to the client. Setting another reply closes the previous one, see :meth:`Reply.close`."""
        return self._reply

    @reply.setter
    def reply(self, reply: Reply | None) -> None:
        if reply is not None and not isinstance(reply, Reply):
            raise TypeError(f"wanted a router_core.Reply, got {reply!r}")  # in the plugin that sets it
        replaced, self._reply = self._reply, reply
        if replaced is not None and replaced is not reply:
            replaced.close()

    @property
    def session(self) -> str | None:
        """The session of the conversation: the given session, else the result of :func:`session_of`."""
        if self._session is _UNREAD:
            self._session = session_of(self.request, self._sources)
        return self._session  # type: ignore[return-value]  # _UNREAD is gone now

    @property
    def client(self) -> str | None:
        """The client's name in FairTurns (turns for long work): the session in the headers, else the address."""
        if self.parent is not None:
            return self.parent.client
        return client_of(self.request, self._address)

    def lease(self, worker: Worker) -> None:
        """Count this request on ``worker`` until :meth:`release`, another lease or the end of the exchange."""
        if self.worker is not None:
            self.release()
        worker.in_flight += 1
        self.worker = worker

    def release(self) -> None:
        """Release the lease. Idempotent."""
        if self.worker is not None:
            self.worker.in_flight -= 1
            self.worker = None

    def may_go_to(self, worker: Worker) -> bool:
        """Return True when the request may go to ``worker``."""
        return self.worker_filter is None or self.worker_filter(worker)

    @property
    def workers(self) -> list[Worker]:
        """The workers that the exchanges of :meth:`all_parts` have leased now."""
        return [each.worker for each in self.all_parts() if each.worker is not None]

    def all_parts(self) -> Iterator[Exchange]:
        """Yield this exchange, and the exchanges that plugins have made for it."""
        yield self
        for part in self._parts:
            yield from part.all_parts()

    def hang_up(self) -> list[Exchange]:
        """Mark the client as gone. Returns the exchanges of :meth:`all_parts` that have a worker."""
        everything = list(self.all_parts())
        for each in everything:
            each.client_disconnected = True
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
        """End the exchange: release the lease, and close the connection to the worker if bytes are unread. Idempotent.

        Calls the functions of :meth:`on_close`. Drops the notes, the reply and links to other exchanges: notes often
        refer to the exchange, and such a cycle would keep a body in memory until the next garbage collection.
        """
        if self._closed:
            return
        self._closed = True
        if self.worker is not None:
            self.release()
        if self._reply is not None:
            self._reply.close()
        for callback in self._on_close:
            try:
                callback()
            except Exception:
                logger.exception("a plugin's on_close failed")
        self._on_close.clear()
        self._parts.clear()
        self.parent = self.worker_filter = None
        self.notes.clear()
        self._reply = None


def client_of(request: Request, address: str | None) -> str | None:
    """Return a client's name for FairTurns: the session in the headers of ``request``, else ``address``."""
    return _in_headers(request) or address


def session_named(value: bytes) -> str:
    """Return the session that a header's ``value`` names, decoded as UTF-8, or as Latin-1 if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def session_of(request: Request, sources: Iterable[SessionSource] = ()) -> str | None:
    """Return the session: ``X-Session-Id``, else ``X-SMG-Routing-Key``, else ``session_id`` in the body.

    Without these, return the first session that one of ``sources`` finds. All parts of the router use this function.
    Raises BadRequest for a name in the request that is too long or has control characters.
    """
    named = _in_headers(request) or _in_body(request)
    if named is not None:
        _check(named)
        return named
    for source in sources:
        named = source(request)
        if named is not None:
            return named
    return None


def check_length(what: str, name: str) -> None:
    """Raise BadRequest when ``name`` is too long; the message calls it ``what``."""
    size = len(name) if name.isascii() else len(name.encode("utf-8", "surrogatepass"))
    if size > _MAX_NAME:
        raise BadRequest(f"{what} has at most {_MAX_NAME} bytes, got {size}")


def _check(name: str) -> None:
    check_length("the name of a session", name)
    if not name.isprintable() and _CONTROL.search(name):  # GET /trajectories/{session} could not name it
        raise BadRequest("the name of a session must have no control characters, such as a line break")


def _in_headers(request: Request) -> str | None:
    routing_key = None
    for name, value in request.headers:
        if name == b"x-session-id" and value:
            return session_named(value)
        if name == b"x-smg-routing-key" and value and routing_key is None:
            routing_key = session_named(value)
    return routing_key


def _in_body(request: Request) -> str | None:
    named = request.field("session_id")
    return named if isinstance(named, str) and named else None
