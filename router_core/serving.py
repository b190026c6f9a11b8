"""uvicorn, as this project uses it: in the running loop for tests and engines, or in the foreground.

Both forms leave ``Server`` and ``Date`` headers to the application: a proxy that adds its own beside the
worker's sends them twice, which breaks aiohttp clients.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Sized
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
import orjson
import uvicorn
import uvloop
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router_core.errors import StartupError
from router_core.types import ASGIApp

__all__ = ["CLIENT_TIMEOUT_S", "bind", "run", "serving", "url_of"]

logger = logging.getLogger(__name__)

#: How long a client may keep the server waiting, in seconds.
CLIENT_TIMEOUT_S = 300.0
_BACKLOG = 4096
_MAX_HEAD_BYTES = 256 * 1024
#: Requests that wait on one connection before it is read no further; what one read brings comes on top.
_MAX_AHEAD = 16
#: Longer than clients keep an idle connection, so that none of them uses one that is just being closed.
_KEEP_ALIVE_S = 75
_FRAMING = (b"content-length", b"transfer-encoding")
_HANDLED = (signal.SIGINT, signal.SIGTERM)


class _Nowhere(list[tuple[bytes, bytes]]):
    """Where the trailer fields of a request go: they are no headers (RFC 9110 section 6.5.1), and may be many."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        pass


_NOWHERE = _Nowhere()


class _Flow(FlowControl):
    """Reads no further while many requests wait on one connection: clients may send ahead, but not without end."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if len(self._waiting) < _MAX_AHEAD:
            super().resume_reading()


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits for clients that send or take too much or too slowly, and errors as JSON.

    ``client_timeout_s`` is the time for the head of a request, for each further piece of its body, and for a client
    to take 64 KiB of what waits for it. A request that comes in one read, and an answer that is taken as it comes,
    need no timer.
    """

    #: The request that is being answered; uvicorn's ``cycle`` is the newest one.
    _served: RequestResponseCycle | None = None
    _in_message = _in_head = False
    #: Bytes in a row that are no body: those of a head, of trailers, of what may stand beside the size of a chunk.
    _overhead = 0
    _unsent = 0
    _fault = "the request is not valid HTTP/1.1"
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, client_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_timeout_s = client_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        # uvicorn begins with this after an answer, and who never asks holds a connection as well.
        self.timeout_keep_alive_task = self.loop.call_later(_KEEP_ALIVE_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True  # uvicorn tells the newest one
            served.message_event.set()

    # What is called for each request names its base: super() would be more than half of what these limits cost.

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        HttpToolsProtocol.data_received(self, data)
        if self.transport.is_closing():
            return
        # Within one read a head may be longer: httptools has it in memory by then.
        if self._overhead > _MAX_HEAD_BYTES:
            self._refuse(431, f"the request's headers are larger than {_MAX_HEAD_BYTES} bytes")
        elif (self._in_message or self.cycle is None or self.cycle.response_complete) and (
            self._reading is None or not self._in_head  # a head gets its time once
        ):
            self._await_more()

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        HttpToolsProtocol.on_message_begin(self)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade() and any(
            name in _FRAMING and value != b"0" for name, value in self.headers
        ):
            # httptools takes what follows for the other protocol: the body would be lost, or be the next request.
            self._fault = (
                "a request with a body may not ask for another protocol: leave out its Upgrade header"
            )
            raise ValueError(self._fault)
        HttpToolsProtocol.on_headers_complete(self)
        self.headers = _NOWHERE
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn would read no further, and not see the client hang up
        else:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._overhead = 0
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        HttpToolsProtocol.on_message_complete(self)

    def _unsupported_upgrade_warning(self) -> None:
        self.cycle.keep_alive = False  # it is answered in this protocol; behind it may be anything

    def _await_more(self) -> None:
        """Give the client its time, from now on, for the rest of a request or for the next one."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(self._client_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        served = self._served
        answering = served is not None and not served.response_complete
        if self.flow.read_paused or (answering and (self._in_head or served is not self.cycle)):
            self._await_more()  # it is not the client who keeps others waiting
        elif self._in_message:
            self._refuse(408, f"the request did not go on for {self._client_timeout_s:g} s")
        else:
            self._close()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._served, _ = self.pipeline[-1]
        HttpToolsProtocol.on_response_complete(self)
        if self.transport.is_closing():
            self._expect_taken()
        elif self._reading is not None:
            self._await_more()  # for what it had begun meanwhile

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None and not self.transport.is_closing():
            self._writing.cancel()
            self._writing = None

    def _expect_taken(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        if self._writing is None:
            self._writing = self.loop.call_later(self._client_timeout_s, self._not_taken)

    def _not_taken(self) -> None:
        self._writing = None
        if self._unsent - self.transport.get_write_buffer_size() >= HIGH_WATER_LIMIT:
            self._expect_taken()  # of a large answer, slowly
            return
        logger.warning(
            "a client takes its answer too slowly or not at all (--client-timeout-secs): %s", self.client
        )
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._fault)

    def _refuse(self, status: int, message: str) -> None:
        served = self._served
        in_body = self._in_message and not self._in_head
        if served is None or not served.response_started or (served.response_complete and not in_body):
            error = {"message": message, "type": "invalid_request_error", "code": f"HTTP_{status}"}
            body = orjson.dumps({"error": error})
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if served is not None:
            served.disconnected = True  # it may not have begun yet, and is not to
            served.message_event.set()
        self._close()

    def _close(self) -> None:
        """Close the connection when the client has taken what waits for it, and has not too long for that."""
        if not self.transport.is_closing():
            self._expect_taken()
            self.transport.close()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone, and is told to stop instead of looking for it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_s: float,
        client_timeout_s: float,
        on_stop: Callable[[], object] | None,
        **options: Any,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(_Protocol, client_timeout_s=client_timeout_s),  # type: ignore[arg-type]  # it is called
                ws="none",
                lifespan="on",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(grace_s)),
                backlog=_BACKLOG,
                **options,
            )
        )
        self.ready = anyio.Event()
        self._stopped = anyio.Event()
        self.crashed = False
        self._on_stop = on_stop

    def stop(self) -> None:
        """Accept nothing more and finish; asked a second time, do not wait."""
        if self._on_stop is not None and not self.should_exit:
            self._on_stop()
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopped.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged what the application's lifespan raised
            raise StartupError("the application cannot start; the log says why") from None
        for sock in sockets or ():
            logger.info("listening on %s", url_of(sock, tls=self.config.is_ssl))
        self.ready.set()

    async def main_loop(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_when_the_lifespan_ends)
            await self._stopped.wait()
            tasks.cancel_scope.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # As uvicorn does it, which sleeps 0.1 s at a time even when there is nothing to wait for.
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with anyio.move_on_after(self.config.timeout_graceful_shutdown) as grace:
            while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110  # sets, not events
                await anyio.sleep(0.005)
        if grace.cancelled_caught:
            logger.warning("cutting off %d requests that outlast the grace period", len(state.tasks))
            for task in state.tasks:
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _stop_when_the_lifespan_ends(self) -> None:
        # Unasked it ends when background work crashes; the application could not answer any more.
        await self.lifespan.shutdown_event.wait()
        self.crashed = True
        self.stop()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket on ``host:port`` (0: any free port). Raises OSError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on what it accepts only if the protocol is named; without, an answer may wait 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The base URL of a server on ``sock``."""
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def serving(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    grace_s: float = 5.0,
    client_timeout_s: float = CLIENT_TIMEOUT_S,
    on_stop: Callable[[], object] | None = None,
    **options: Any,
) -> AsyncIterator[str]:
    """Serve ``app`` in the running event loop; the value is its base URL, ready for requests.

    Leaving the block stops accepting, lets requests in flight finish for ``grace_s`` seconds (whole
    seconds, at least one), and then cancels them; ``on_stop`` is called as that begins. A client that keeps the
    server waiting for ``client_timeout_s`` is refused or cut off. ``options`` go to ``uvicorn.Config`` (TLS files).
    Raises OSError, and an ExceptionGroup of StartupError when the application's lifespan fails.
    """
    with bind(host, port) as sock:
        server = _Server(app, grace_s=grace_s, client_timeout_s=client_timeout_s, on_stop=on_stop, **options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_serve_to_the_end, server, sock)
            try:
                await server.ready.wait()
                yield url_of(sock, tls=server.config.is_ssl)
            finally:
                server.stop()


async def _serve_to_the_end(server: _Server, sock: socket.socket) -> None:
    # It is always told to stop. Cancelled instead, it would leave its listener open, for which uvloop waits for ever.
    with anyio.CancelScope(shield=True):
        await server.serve([sock])


def _calm_the_collector() -> None:
    # A request leaves hardly any cycles, yet at the default threshold of 700 objects the collector took a
    # fifth of the time of a proxied request. What was imported lives as long as the process: do not walk it.
    gc.collect()
    gc.freeze()
    # The youngest are looked at often, so that a pause stays within milliseconds; all of them hardly ever.
    gc.set_threshold(5_000, 5, 10_000)


async def _serve_until_signalled(app: ASGIApp, sock: socket.socket, **options: Any) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(app, **options)
    for number in _HANDLED:
        loop.add_signal_handler(number, server.stop)
    try:
        await server.serve([sock])
    finally:
        for number in _HANDLED:
            loop.remove_signal_handler(number)
    if server.crashed:
        raise SystemExit(1)  # uvicorn has logged why


def run(
    app: ASGIApp,
    sock: socket.socket,
    *,
    grace_s: float,
    client_timeout_s: float = CLIENT_TIMEOUT_S,
    on_stop: Callable[[], object] | None = None,
    **options: Any,
) -> None:
    """Serve ``app`` on a socket of :func:`bind` in the foreground until SIGTERM or SIGINT; then finish and return.

    Requests that are still running ``grace_s`` seconds after the signal, at which ``on_stop`` is called, are
    cancelled. A second signal ends at once. ``client_timeout_s`` and ``options`` are as for :func:`serving`.
    Raises StartupError when the application's lifespan fails.
    """
    _calm_the_collector()
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            _serve_until_signalled(
                app, sock, grace_s=grace_s, client_timeout_s=client_timeout_s, on_stop=on_stop, **options
            )
        )
