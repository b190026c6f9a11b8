"""Workers on servers that nobody here wrote, each a context manager of its base URL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal

from core.aiohttp_worker import aiohttp_serving
from core.asgi_worker import make_app
from ports import free_port
from programs import program
from slime_http.asgi import ASGIApp

__all__ = ["nginx", "on_aiohttp", "on_granian", "on_nginx", "on_uvicorn"]

_HERE = Path(__file__).parent


@contextmanager
def _process(command: list[str], port: int, **options: object) -> Iterator[str]:
    """Run ``command`` while the block runs; it is ready when ``port`` accepts connections."""
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]  # options of Popen
        try:
            for _ in range(1000):
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        pytest.fail(f"{command[0]} ended with {process.returncode}")
                    time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def on_uvicorn(
    http: Literal["h11", "httptools"], app: ASGIApp | None = None, **options: Any
) -> Iterator[str]:
    """uvicorn with that parser, in a thread, of a worker or of an ``app`` with a lifespan.

    ``options`` go to its configuration.
    """
    config = uvicorn.Config(
        app or make_app(),
        http=http,
        lifespan="on" if app else "off",
        log_config=None,
        access_log=False,
        **options,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "uvicorn did not start"
                time.sleep(0.005)
            yield f"{'https' if config.is_ssl else 'http'}://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextmanager
def on_aiohttp(keepalive_s: float = 60) -> Iterator[str]:
    """aiohttp's server, in a thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(aiohttp_serving(keepalive_s)) as url,
    ):
        yield url


@contextmanager
def on_granian(app: str = "core.asgi_worker:app", **environment: str) -> Iterator[str]:
    """granian (hyper, in Rust), in a process with these variables in its ``environment``."""
    port = free_port()
    command = [sys.executable, "-m", "granian", "--interface", "asgi", "--no-ws", "--log-level", "error"]
    command += ["--host", "127.0.0.1", "--port", str(port), app]
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = os.pathsep.join([str(_HERE.parent), *map(os.path.abspath, inherited)])
    variables = os.environ | {"PYTHONPATH": paths} | environment
    # granian imports from its working directory first: there must be no sources beside an installed router.
    with _process(command, port, env=variables, cwd=_HERE) as url:
        yield url


@contextmanager
def nginx(folder: Path, server: str) -> Iterator[str]:
    """nginx with the lines ``server`` in its server block (``PORT`` is its port); skips when it is not installed."""
    binary = program("nginx")
    port = free_port()
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    temporary += " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
        events {{}}
        http {{ access_log off; {temporary} client_max_body_size 0; client_body_buffer_size 1m;
        server {{ {server.replace("PORT", str(port))} }} }}
        """
    )
    with _process([binary, "-p", str(folder), "-c", str(folder / "nginx.conf")], port) as url:
        yield url


@contextmanager
def on_nginx(folder: Path) -> Iterator[str]:
    """nginx in front of uvicorn, as gateways in front of engines often are."""
    with on_uvicorn("httptools") as behind:
        forward = (
            f"proxy_pass {behind}; proxy_http_version 1.1; proxy_buffering off; proxy_request_buffering off;"
        )
        peer = "location = /peer { return 200 $remote_port; }"
        with nginx(folder, f"listen 127.0.0.1:PORT; {peer} location / {{ {forward} }}") as url:
            yield url
