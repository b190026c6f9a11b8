"""uvicorn, as this project uses it: in the running loop for tests and engines, or in the foreground.

Both forms leave ``Server`` and ``Date`` headers to the application: a proxy that adds its own beside the
worker's sends them twice, which breaks aiohttp clients.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn

from router_core.types import ASGIApp

__all__ = ["bind", "run", "serving"]

_BACKLOG = 4096
_HANDLED = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _server(app: ASGIApp, grace_s: float, **options: Any) -> _Server:
    return _Server(
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


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket on ``host:port`` (0: any free port). Raises OSError when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _url(sock: socket.socket, *, tls: bool) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@asynccontextmanager
async def serving(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, grace_s: float = 5.0, **options: Any
) -> AsyncIterator[str]:
    """Serve ``app`` in the running event loop; the value is its base URL, ready for requests.

    Leaving the block stops accepting, lets requests in flight finish for ``grace_s`` seconds (whole
    seconds, at least one), and then cancels them. ``options`` go to ``uvicorn.Config`` (TLS files).
    """
    sock = bind(host, port)
    server = _server(app, grace_s, **options)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [sock])
            while not server.started:  # noqa: ASYNC110  # uvicorn offers a flag, not an event
                await anyio.sleep(0.005)
            try:
                yield _url(sock, tls=server.config.is_ssl)
            finally:
                server.should_exit = True
    finally:
        sock.close()


def _calm_the_collector() -> None:
    # A request leaves hardly any cycles, yet at the default threshold of 700 objects the collector took a
    # fifth of the time of a proxied request. What was imported lives as long as the process: do not walk it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _serve_until_signalled(server: _Server, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def leave() -> None:
        server.force_exit = server.should_exit  # the second signal does not wait
        server.should_exit = True

    for number in _HANDLED:
        loop.add_signal_handler(number, leave)
    try:
        await server.serve([sock])
    finally:
        for number in _HANDLED:
            loop.remove_signal_handler(number)


def run(app: ASGIApp, *, host: str, port: int, grace_s: float, **options: Any) -> None:
    """Serve ``app`` in the foreground until SIGTERM or SIGINT; then finish what is in flight and return.

    Requests that are still running ``grace_s`` seconds after the signal are cancelled. A second signal
    ends at once. Raises OSError when the address is taken.
    """
    sock = bind(host, port)
    server = _server(app, grace_s, **options)
    _calm_the_collector()
    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_serve_until_signalled(server, sock))
    finally:
        sock.close()
