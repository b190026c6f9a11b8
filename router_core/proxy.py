"""Chooses the worker of an exchange, sends it the request, and relays the reply to the client."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from router_core.errors import HTTPError, NoWorker, WorkerBroke, WorkerTimeout, WorkerUnreachable
from router_core.exchange import Exchange
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from router_core.types import Send
from router_core.workers import Worker, least_in_flight
from slime_http.asgi import send_now_of, send_whole
from slime_http.limits import Limits
from slime_http.upstream import Upstream

__all__ = ["PATH", "SENT_AT", "WORKER", "Proxy", "relay"]

SelectWorker = Callable[[Exchange, Sequence[Worker]], Worker | None]

_NO_BODY = (204, 304)
#: Keys in the ASGI state of a client's request: the last worker asked, the loop time of sending, and a rewritten path.
WORKER, SENT_AT, PATH = "slime_router.worker", "slime_router.sent_at", "slime_router.path"


class Proxy:
    """Leases a worker for each exchange, and sends it the request."""

    def __init__(
        self,
        pool: WorkerPool,
        select: SelectWorker,
        limits: Limits,
        tls: ssl.SSLContext | None,
        on_failure: Callable[[Worker, Request, HTTPError | None], None],
        reachable: Callable[[str, str], bool],
    ) -> None:
        self._reachable = reachable
        self._on_failure = on_failure
        self._leaving: list[Upstream] = []
        self._pool = pool
        self._select = select
        self._limits = limits
        self._tls = tls
        self._upstreams: dict[str, Upstream] = {}

    @property
    def open_connections(self) -> int:
        """The number of connections to workers: busy, idle, or being opened."""
        return sum(upstream.open_connections for upstream in self._all())

    @property
    def busy_connections(self) -> int:
        """The number of connections to workers that have a request under way, or are being opened."""
        return sum(upstream.busy_connections for upstream in self._all())

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Lease a worker for ``exchange``: its session's worker, else the plugins' choice, else the least loaded.

        The choice may be a worker's target. The workers in ``but`` are excluded. Raises NoWorker if no worker is left.
        """
        workers: Sequence[Worker] = self._pool.routable()
        if exchange.worker_filter is not None:
            workers = [worker for worker in workers if exchange.may_go_to(worker.server)]
            if not workers:
                told = self._pool.standings()
                raise NoWorker(f"no ready worker is eligible for this request's model or filter: {told}")
        if but:
            workers = [worker for worker in workers if worker.server not in but]
            if not workers:
                raise NoWorker("every eligible worker has failed this request")
        session = exchange.session
        worker = self._pool.of_session(session) if session is not None else None
        if worker is None or worker.server in but or not exchange.may_go_to(worker.server):
            worker = self._select(exchange, workers) or least_in_flight(workers)
            if session is not None:
                self._pool.bind(session, worker)
        exchange.lease(worker)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Send ``request`` to the worker that ``exchange`` has leased; returns when status and headers are there.

        ``body``, if given, is sent in place of the request's body. Raises WorkerUnreachable, WorkerBroke and
        WorkerTimeout.
        """
        assert exchange.worker is not None, "choose a worker first"
        worker = exchange.worker.server
        upstream = self._upstreams.get(worker.url)
        if upstream is None:
            upstream = self._upstreams[worker.url] = self._connector(worker)
        state = exchange.scope.get("state") if exchange.scope is not None else None
        if state is not None:
            state[WORKER] = worker
        try:
            answer = await upstream.request(
                request.method, request.target, request.headers, request.body if body is None else body
            )
        except (WorkerUnreachable, WorkerBroke, WorkerTimeout) as error:
            self._on_failure(worker, request, error)
            raise
        except asyncio.CancelledError:
            self._on_failure(worker, request, None)
            raise
        if state is not None:
            state[SENT_AT] = answer.sent_at
        if answer.complete:
            # An answer without a Content-Length stays a stream: the client gets no Content-Length, either.
            return Reply(answer.status, answer.headers, answer.take() if answer.sized else answer)
        answer.watch(partial(self._on_failure, worker, request))
        return Reply(answer.status, answer.headers, answer)

    async def ask(self, worker: Worker, request: Request) -> Reply:
        """Send the router's own ``request`` to ``worker``, registered or not, without a lease and without hooks.

        The caller closes the reply. Raises WorkerUnreachable, WorkerBroke and WorkerTimeout.
        """
        upstream = self._upstreams.get(worker.url)
        if upstream is None:
            upstream = self._connector(worker)
            upstream.retire()  # closes the connection after this request
            self._leaving.append(upstream)
        answer = await upstream.request(request.method, request.target, request.headers, request.body)
        return Reply(answer.status, answer.headers, answer)

    def _connector(self, worker: Worker) -> Upstream:
        return Upstream(
            worker.url, self._limits, self._tls, api_key=worker.api_key, reachable=self._reachable
        )

    def heard(self, worker: Worker) -> float:
        """Return the event loop time at which ``worker`` last sent part of an answer; ``-inf``: never."""
        upstream = self._upstreams.get(worker.url)
        return upstream.heard_at if upstream is not None else -math.inf

    def authorize(self, worker: Worker) -> None:
        """Use the API key of ``worker`` from now on; registering it again may have changed the key."""
        upstream = self._upstreams.get(worker.url)
        if upstream is not None:
            upstream.authorize(worker.api_key)

    def forget(self, worker: Worker) -> None:
        """Drop the idle connections of ``worker``, which was removed; its requests in flight go on."""
        self._leaving = [upstream for upstream in self._leaving if upstream.open_connections]
        upstream = self._upstreams.pop(worker.url, None)
        if upstream is not None:
            upstream.retire()
            self._leaving.append(upstream)

    def close(self) -> None:
        """Close all connections."""
        for upstream in self._all():
            upstream.close()
        self._upstreams.clear()
        self._leaving.clear()

    def _all(self) -> list[Upstream]:
        return [*self._upstreams.values(), *self._leaving]


def relay(reply: Reply, method: str, send: Send, before_last: Callable[[], None]) -> Awaitable[None] | None:
    """Pass ``reply`` on by ``send``. Returns None if all of it is sent, else an awaitable that sends it.

    ``before_last`` is called before the last piece, to stop watching the client. Raises what reading the reply raises.
    """
    headers, status, body = reply.headers, reply.status, reply.whole()
    bodiless = method == "HEAD" or status in _NO_BODY
    if status in _NO_BODY:
        # No body follows, but a server would wait for as many bytes as Content-Length says.
        headers = [pair for pair in headers if pair[0] != b"content-length"]
    elif body is not None and not bodiless and reply.header(b"content-length") is None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    if body is not None:
        before_last()
        return send_whole(send, status, headers, b"" if bodiless else body)

    async def stream() -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        # A server sends the head only with the first message of the body: send an empty message at once.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        send_now = send_now_of(send)
        last = False
        while not last:
            if send_now is not None:
                await reply.pump(send_now)
            piece, last = await reply.next_piece()
            if last:
                before_last()
            await send(
                {"type": "http.response.body", "body": b"" if bodiless else piece, "more_body": not last}
            )

    return stream()
