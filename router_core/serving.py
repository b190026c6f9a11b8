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
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn
import uvloop

from router_core.errors import StartupError
from router_core.types import ASGIApp

__all__ = ["bind", "run", "serving", "url_of"]

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_HANDLED = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone, and is told to stop instead of looking for it."""

    def __init__(self, app: ASGIApp, grace_s: float, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
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
        self.ready = anyio.Event()
        self._stopped = anyio.Event()
        self.crashed = False

    def stop(self) -> None:
        """Accept nothing more and finish; asked a second time, do not wait."""
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
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, grace_s: float = 5.0, **options: Any
) -> AsyncIterator[str]:
    """Serve ``app`` in the running event loop; the value is its base URL, ready for requests.

    Leaving the block stops accepting, lets requests in flight finish for ``grace_s`` seconds (whole
    seconds, at least one), and then cancels them. ``options`` go to ``uvicorn.Config`` (TLS files).
    Raises OSError, and an ExceptionGroup of StartupError when the application's lifespan fails.
    """
    with bind(host, port) as sock:
        server = _Server(app, grace_s, **options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [sock])
            await server.ready.wait()
            try:
                yield url_of(sock, tls=server.config.is_ssl)
            finally:
                server.stop()


def _calm_the_collector() -> None:
    # A request leaves hardly any cycles, yet at the default threshold of 700 objects the collector took a
    # fifth of the time of a proxied request. What was imported lives as long as the process: do not walk it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _serve_until_signalled(app: ASGIApp, sock: socket.socket, grace_s: float, **options: Any) -> None:
    loop = asyncio.get_running_loop()
    server = _Server(app, grace_s, **options)
    for number in _HANDLED:
        loop.add_signal_handler(number, server.stop)
    try:
        await server.serve([sock])
    finally:
        for number in _HANDLED:
            loop.remove_signal_handler(number)
    if server.crashed:
        raise SystemExit(1)  # uvicorn has logged why


def run(app: ASGIApp, sock: socket.socket, *, grace_s: float, **options: Any) -> None:
    """Serve ``app`` on a socket of :func:`bind` in the foreground until SIGTERM or SIGINT; then finish and return.

    Requests that are still running ``grace_s`` seconds after the signal are cancelled. A second signal
    ends at once. Raises StartupError when the application's lifespan fails.
    """
    _calm_the_collector()
    with sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signalled(app, sock, grace_s, **options))
