"""uvicorn servers: in the running event loop for tests and engines, or in the foreground.

Both kinds leave the headers ``Server`` and ``Date`` to the application. A proxy that added these two to a worker's
headers would send both twice, which breaks aiohttp clients.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import uvicorn
import uvloop

from slime_http.asgi import ASGIApp, Scope
from slime_http.client_connection import Observer
from slime_http.lifespan import Lifespan
from slime_http.memory import return_large_blocks, tune_gc
from slime_http.server_protocol import Protocol

__all__ = ["CLIENT_TIMEOUT_S", "bind", "run", "serving", "url_of"]

logger = logging.getLogger(__name__)

#: Seconds that a client may keep the server waiting.
CLIENT_TIMEOUT_S = 300.0
_BACKLOG = 4096
#: Seconds in which requests may finish after the application has ended by itself.
_CRASH_GRACE_S = 1
#: Seconds until an idle connection is closed: longer than clients keep one, so none uses it while it is being closed.
_KEEP_ALIVE_S = 75.0
#: Seconds after which the event loop aborts the close of a TLS connection; WriteFlow cuts off slow clients earlier.
_TLS_CLOSE_S = 86_400.0
#: A log line lists at most this many kinds of requests in flight, with at most this many bytes of each path.
_MAX_TOLD, _MAX_PATH = 5, 256
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, and ends when ``stop`` is called."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_s: float,
        client_timeout_s: float,
        on_stop: Callable[[], object] | None,
        on_start: Callable[[str], object] | None = None,
        level: int = logging.INFO,
        **options: Any,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,  # type: ignore[arg-type]  # uvicorn would import its own
                interface="asgi3",  # not guessed: the outermost layer may be a plain function
                ws="none",
                lifespan="on",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
                backlog=_BACKLOG,
                **options,
            )
        )
        self.config.load()
        observers: list[Observer] = []
        self.config.lifespan_class = partial(Lifespan, observers=observers)
        self.ready = anyio.Event()
        self._stopped = anyio.Event()
        self.crashed = False
        self._protocol: Any = partial(
            Protocol, client_timeout_s=client_timeout_s, keep_alive_s=_KEEP_ALIVE_S, observers=observers
        )
        self._on_stop = on_stop
        self._on_start = on_start
        self._level = level

    def stop(self) -> None:
        """Accept no more requests, and finish those in flight; on a second call, do not wait for them."""
        if not self.should_exit:
            logger.log(
                self._level, "shutting down: no new requests; in flight, with %s s to end: %s",
                self._grace_s, self._in_flight(),
            )  # fmt: skip
            if self._on_stop is not None:
                self._on_stop()
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopped.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()  # raises StartupError
        config = self.config
        make = partial(self._protocol, config, self.server_state, self.lifespan.state)
        # By default a client with TLS has only 30 s to take all bytes that are buffered when the connection closes.
        tls: Any = {"ssl": config.ssl, "ssl_shutdown_timeout": _TLS_CLOSE_S} if config.is_ssl else {}
        loop = asyncio.get_running_loop()
        self.servers = []
        for sock in sockets or ():
            self.servers.append(await loop.create_server(make, sock=sock, backlog=_BACKLOG, **tls))
            url = url_of(sock, tls=self.config.is_ssl)
            if self._on_start is not None:
                self._on_start(url)
            logger.log(self._level, "listening on %s", url)
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_when_the_lifespan_ends)
            await self._stopped.wait()
            tasks.cancel_scope.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's own shutdown sleeps 0.1 s at a time, even when there is nothing to wait for.
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        state = self.server_state
        told: set[object] = set()
        with anyio.move_on_after(self._grace_s) as grace:
            while True:
                for connection in state.connections - told:  # some come late, after the TLS handshake
                    connection.shutdown()
                told |= state.connections
                if self.force_exit or not (state.connections or state.tasks):
                    break
                await anyio.sleep(0.005)
        if grace.cancelled_caught:
            logger.warning("the grace period is over, cutting off %s", self._in_flight())
            for connection in list(state.connections):
                served = connection.served  # type: ignore[union-attr]  # our own
                if served is not None:
                    served.cut_off()
            for task in state.tasks:
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

    @property
    def _grace_s(self) -> int:
        """The seconds that requests in flight have to finish. After a crash of the application: at most one second."""
        grace_s = self.config.timeout_graceful_shutdown
        assert grace_s is not None  # narrowing: it is set in __init__
        return min(grace_s, _CRASH_GRACE_S) if self.crashed else grace_s

    def _in_flight(self) -> str:
        """Return the requests that are being answered, counted by method and path, for the log."""
        served = [connection.served for connection in self.server_state.connections]  # type: ignore[union-attr]  # our own
        targets = Counter(_target(each.scope) for each in served if each is not None and not each.complete)
        told = [f"{number} {target}" for target, number in targets.most_common(_MAX_TOLD)]
        if len(targets) > _MAX_TOLD:
            told.append("and others")
        return f"{targets.total()} ({', '.join(told)})" if told else "0"

    async def _stop_when_the_lifespan_ends(self) -> None:
        # The lifespan ends by itself only when background work crashes. Then the application cannot answer any more.
        await self.lifespan.shutdown_event.wait()
        self.crashed = True
        self.stop()


def _target(scope: Scope) -> str:
    """Return the method and the path of a request for the log: raw, since the decoded path may have line breaks."""
    return f"{scope['method']} {scope['raw_path'][:_MAX_PATH].decode('latin-1')}"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on ``host:port`` (0: any free port). Raises OSError, such as for a taken port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on accepted sockets only if the listener names IPPROTO_TCP. Without TCP_NODELAY answers
    # may wait 40 ms.
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
    """Return the base URL of a server on ``sock``."""
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
    level: int = logging.INFO,
    **options: Any,
) -> AsyncIterator[str]:
    """Serve ``app`` in the running event loop; yields its base URL once it accepts requests.

    At the end of the block the server calls ``on_stop`` and stops accepting. Requests in flight have ``grace_s``
    seconds (rounded, at least one) to finish, and are then cancelled. A client that keeps the server waiting for
    ``client_timeout_s`` is refused or cut off. ``level`` is the log level of the lines about the server's start and
    end: DEBUG for a server beside the router's own. ``options`` go to ``uvicorn.Config`` (TLS files).
    Raises OSError, and an ExceptionGroup of StartupError when the application's lifespan cannot start.
    """
    with bind(host, port) as sock:
        server = _Server(
            app, grace_s=grace_s, client_timeout_s=client_timeout_s, on_stop=on_stop, level=level, **options
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_serve_to_the_end, server, sock)
            try:
                await server.ready.wait()
                yield url_of(sock, tls=server.config.is_ssl)
            finally:
                server.stop()


async def _serve_to_the_end(server: _Server, sock: socket.socket) -> None:
    # serving() always calls stop(). Without the shield a cancellation would end the server while its listener is open,
    # and uvloop would hang.
    with anyio.CancelScope(shield=True):
        await server.serve([sock])


async def _serve_until_signalled(app: ASGIApp, sock: socket.socket, **options: Any) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(app, **options)
    handled = [
        number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup ignores SIGHUP
    for number in handled:
        loop.add_signal_handler(number, server.stop)
    try:
        await server.serve([sock])
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
    if server.crashed:
        raise SystemExit(1)  # the log says why


def run(
    app: ASGIApp,
    sock: socket.socket,
    *,
    grace_s: float,
    client_timeout_s: float = CLIENT_TIMEOUT_S,
    on_stop: Callable[[], object] | None = None,
    on_start: Callable[[str], object] | None = None,
    **options: Any,
) -> None:
    """Serve ``app`` on a socket of :func:`bind` in the foreground until SIGTERM, SIGINT or SIGHUP; then finish.

    ``on_start`` is called with the base URL when requests are accepted, ``on_stop`` at the signal. Requests that are
    still running ``grace_s`` seconds later are cancelled. A second signal ends the server at once.
    ``client_timeout_s`` and ``options`` are as for :func:`serving`.
    Raises StartupError when the application's lifespan cannot start, and SystemExit when the lifespan ends by itself.
    """
    tune_gc()
    return_large_blocks()
    serve = partial(
        _serve_until_signalled,
        app,
        sock,
        grace_s=grace_s,
        client_timeout_s=client_timeout_s,
        on_stop=on_stop,
        on_start=on_start,
        **options,
    )
    with sock:
        # With asyncio.Runner, anyio would not know the event loop in callbacks of connections, which belong to no task.
        anyio.run(serve, backend_options={"loop_factory": uvloop.new_event_loop})
