"""The proxies that are compared: how each is started, and the message when a proxy is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import anyio
import httpx

from benchmarks import nginx
from benchmarks.processes import PROXY_CORE, Child, child, free_port

__all__ = [
    "BASELINE",
    "Peer",
    "Running",
    "first_answer",
    "gateway",
    "httpx_proxy",
    "nginx_proxy",
    "router",
    "started",
]

#: Ratios are against this peer.
BASELINE = "sglang-router"

_START_DEADLINE_S = 30.0
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy that can be started in front of one worker.

    ``command`` returns the command line, from the proxy's port, the worker's URL and a directory for files. ``missing``
    returns the reason why the proxy cannot run, or None. ``is_ours``: the proxy is this project's router. ``is_tiny``:
    a tiny run measures the proxy, too.
    """

    name: str
    command: Callable[[int, str, Path], Sequence[str]]
    missing: Callable[[], str | None] = field(default=lambda: None)
    is_ours: bool = False
    is_tiny: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that answers; without a ``child`` it is the worker itself."""

    name: str
    url: str
    child: Child | None = None

    def cpu_s(self) -> float:
        """Return the processor time so far, in seconds; 0 for the worker itself."""
        return self.child.cpu_s() if self.child else 0.0


def router(name: str, *flags: str, tiny: bool = True) -> Peer:
    """Return this project's router with ``flags``. If ``tiny`` is False, a tiny run leaves it out."""

    def command(port: int, worker_url: str, directory: Path) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker_url]
        return [sys.executable, "-m", "router_core", *address, *flags]

    def missing() -> str | None:
        there = importlib.util.find_spec("router_core.__main__")
        return None if there else "the router cannot be run: router_core has no __main__ here"

    return Peer(name, command, missing, is_ours=True, is_tiny=tiny)


def gateway(python: str) -> Peer:
    """Return SGLang's Rust gateway. Features that the router without plugins does not have are off.

    The gateway's default policy (cache_aware) keeps a tree of prompts; round_robin does not. Retries need a copy of
    each request, and the circuit breaker a record of each reply, so retries and the circuit breaker are off.
    """

    def command(port: int, worker_url: str, directory: Path) -> list[str]:
        return [
            *(python, "-m", "sglang_router.launch_router"),
            *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker_url),
            *("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"),
            *(
                "--log-level",
                "error",
                "--prometheus-host",
                "127.0.0.1",
                "--prometheus-port",
                str(free_port()),
            ),
        ]

    def missing() -> str | None:
        if _can_import(python, "sglang_router"):
            return None
        return (
            f"{python} cannot import sglang_router. Make an environment for it (python -m venv gateway && "
            "gateway/bin/pip install sglang-router==0.3.2) and name it: --gateway-python gateway/bin/python"
        )

    return Peer(BASELINE, command, missing)


def nginx_proxy() -> Peer:
    """Return nginx with upstream keep-alive: the fastest peer."""
    return Peer("nginx", nginx.proxy_command, lambda: None if nginx.is_installed() else nginx.MISSING)


def httpx_proxy() -> Peer:
    """Return the plain proxy of Starlette and httpx (``httpx_proxy.py``)."""

    def command(port: int, worker_url: str, directory: Path) -> list[str]:
        return [
            *(
                "env",
                f"WORKER_URL={worker_url}",
                sys.executable,
                "-m",
                "uvicorn",
                "benchmarks.httpx_proxy:app",
            ),
            *("--host", "127.0.0.1", "--port", str(port), "--backlog", "4096"),
            *("--no-access-log", "--log-level", "warning"),
        ]

    return Peer("starlette+httpx", command)


async def started(
    stack: AsyncExitStack,
    peers: Sequence[Peer],
    worker_url: str,
    directory: Path,
    request: bytes,
    is_right: Callable[[httpx.Response], bool],
) -> list[Running]:
    """Start ``peers`` on the CPU core ``PROXY_CORE``. They run until ``stack`` closes.

    Each of the returned proxies has answered ``request`` correctly. A peer that ends, or does not answer correctly
    within half a minute, is left out, and the end of its output is printed. But if this peer is the project's router,
    RuntimeError is raised.
    """
    proxies = []
    for peer in peers:
        port = free_port()
        command = peer.command(port, worker_url, directory)
        proxy = stack.enter_context(child(peer.name, command, core=PROXY_CORE, directory=directory))
        url = f"http://127.0.0.1:{port}"
        if (fault := await first_answer(proxy, url, request, is_right)) is None:
            proxies.append(Running(peer.name, url, proxy))
        elif peer.is_ours:
            raise RuntimeError(f"{peer.name}: {fault}\n{proxy.last_words()}")
        else:
            print(f"left out: {peer.name}: {fault}\n{proxy.last_words()}", file=sys.stderr)
    return proxies


async def first_answer(
    proxy: Child, url: str, request: bytes, is_right: Callable[[httpx.Response], bool]
) -> str | None:
    """Send ``request`` until the answer is right. Returns None, or the last fault if the proxy ends or 30 s pass."""
    fault = "it did not listen"
    deadline = time.monotonic() + _START_DEADLINE_S
    async with httpx.AsyncClient(base_url=url, headers=_JSON, trust_env=False, timeout=30.0) as client:
        while proxy.process.poll() is None and time.monotonic() < deadline:
            try:
                reply = await client.post("/generate", content=request)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__} {error}"
            else:
                if is_right(reply):
                    return None
                fault = f"it answered {reply.status_code} {reply.content[:200]!r}"
            await anyio.sleep(0.1)
    return fault


@lru_cache
def _can_import(python: str, module: str) -> bool:
    try:
        return (
            subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=60).returncode
            == 0
        )
    except OSError:
        return False
