"""A client that closes its connection at any step of its request leaves nothing behind.

A step is a byte of the request, or a turn of the event loop after the request. The router has its default plugins,
``radix_cache``, ``openai`` and a single slot for requests. It runs on its own server, and all connections are sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import orjson
import pytest

from core.servers import content, dial, on_uvloop
from deadlines import HANG_S
from radix_cache.claims import PROMPT, trained
from router_core.request import LARGE_BYTES
from slime_engine.tokenizer import corpus_documents, train_tokenizer
from slime_http.serving import serving
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start
    from slime_http.asgi import ASGIApp, Message, Receive, Scope, Send
    from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_uvloop]

IDS = [300, 301, 302, 303]
_TEXT, _CHAT = {"text": PROMPT}, {"messages": [{"role": "user", "content": "hello"}]}
#: Path and body of each kind of request.
KINDS = {
    "passed on": ("/anything", b"{}"),
    "whole": ("/generate", orjson.dumps(_TEXT)),
    "streamed": ("/generate", orjson.dumps(_TEXT | {"stream": True})),
    "tried again": ("/generate", orjson.dumps(_TEXT)),  # the engine refuses it once
    "large body": ("/generate", orjson.dumps(_TEXT).ljust(LARGE_BYTES)),
    "chat": ("/v1/chat/completions", orjson.dumps(_CHAT)),
    "streamed chat": ("/v1/chat/completions", orjson.dumps(_CHAT | {"stream": True})),
}
MOST_TURNS = 2000


def request_of(kind: str, session: str) -> bytes:
    path, body = KINDS[kind]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Session-Id: {session}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def in_turns(app: ASGIApp) -> ASGIApp:
    """Return ``app``, with turns of the event loop before and after each part of an answer."""

    async def spaced(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            await asyncio.sleep(0)
            await send(message)
            await asyncio.sleep(0)

        await app(scope, receive, sent if scope["type"] == "http" else send)

    return spaced


def hang_up(raw: socket.socket, *, reset: bool) -> None:
    if reset:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@dataclass
class Rig:
    """A router, its engine, and the tasks and files that they need at rest."""

    running: Running
    engine: FakeEngine
    tasks: int = 0
    files: int = 0

    def held(self) -> list[str]:
        """Return what requests have not given back."""
        router = self.running.router
        kept = router.components.get("ownership")._trajectories
        unpinned, segment = 0, kept._ages.oldest
        while segment is not None:
            unpinned, segment = unpinned + 1, segment.newer
        found = {
            "a lease": any(worker.in_flight for worker in router.pool),
            "a connection to the worker": router.proxy.busy_connections > 0,
            "an exchange": any(router.clients.exchanges),
            "a turn": router.long_work.waiting or router.long_work._free != 1,
            "a pinned segment": unpinned != kept.segments,
            "a task": len(asyncio.all_tasks()) > self.tasks,
            "a file": self.open_files() > self.files,
        }
        return [name for name, is_held in found.items() if is_held]

    def open_files(self) -> int:
        """Return the number of open files, without both ends of the connections to the worker."""
        return len(os.listdir("/proc/self/fd")) - 2 * self.running.router.proxy.open_connections

    async def settle(self, after: object) -> None:
        """Return when nothing is held."""
        with anyio.move_on_after(HANG_S):
            while self.held():  # noqa: ASYNC110  # closing takes some turns of the loop
                await anyio.sleep(0.001)
        assert self.held() == [], after

    async def cut(self, request: bytes, turns: int) -> bytes | None:
        """Send ``request`` and hang up after so many turns. Returns the answer if it was whole before, else None."""
        with await dial(self.running.url) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, request)
            answer = b""
            for _ in range(turns):
                try:
                    answer += raw.recv(1 << 20)
                    return content(answer)
                except (BlockingIOError, ValueError):
                    await asyncio.sleep(0)
            hang_up(raw, reset=turns % 2 == 1)
        return None

    async def check_records(self, kind: str, session: str) -> None:
        """Ask once more: the slot is free, the answer is recorded, and so is nothing that no engine has sampled."""
        path, body = KINDS[kind]
        client, headers = self.running.client, {"x-session-id": session, "content-type": "application/json"}
        answer = await client.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if path == "/anything":
            assert answer.content == b"{}"
            return
        told = (await client.get(f"/trajectories/{session}")).json()
        prompt = self.engine.consumed[-1]
        records = [record["tokens"] for record in told["trajectories"]]
        assert prompt + IDS in records
        for record in told["trajectories"]:
            sampled = trained(record)
            assert sampled == IDS[: len(sampled)]
            assert record["tokens"] == prompt + sampled
            assert record["exact"], record["inexact_reason"]


@asynccontextmanager
async def routed(start: Start) -> AsyncIterator[Rig]:
    engine = FakeEngine(train_tokenizer(corpus_documents()))
    engine.rest = lambda _: IDS
    engine.pieces = 300  # about one event
    plugins = ("--plugin", "radix_cache", "--plugin", "openai", "--middleware-paths", "quick_tokenizer")
    limits = ("--max-concurrent-requests", "1", "--queue-size", "0", "--retry-initial-backoff-ms", "0.1")
    async with (
        serving(in_turns(engine.app)) as url,
        start(*plugins, *limits, "--worker-urls", url) as running,
    ):
        rig = Rig(running, engine)
        with anyio.fail_after(HANG_S):
            while (await running.client.get("/readiness")).status_code != 200:  # noqa: ASYNC110  # it is joining
                await anyio.sleep(0.01)
        for kind in KINDS:
            await rig.check_records(kind, "warm")
        seen = []
        for _ in range(20):
            await anyio.sleep(0.002)
            seen.append((len(asyncio.all_tasks()), rig.open_files()))
        rig.tasks, rig.files = min(tasks for tasks, _ in seen), min(files for _, files in seen)
        yield rig


#: With a grace period, the request goes on until the engine has ended its answer; without one it is cancelled.
GRACE = pytest.mark.parametrize("grace_s", [2.0, 0.0], ids=["aborted", "cancelled"])


def notice_at_once(monkeypatch: pytest.MonkeyPatch, grace_s: float) -> None:
    """Let the router watch each request from its first turn on, for a client that hangs up."""
    monkeypatch.setattr("router_core.client._PATIENCE_S", 0.0)
    monkeypatch.setattr("router_core.client._DISCONNECT_GRACE_S", grace_s)


async def test_hang_up_at_any_byte_of_a_request_leaves_nothing_behind(start: Start) -> None:
    async with routed(start) as rig:
        engine = rig.engine
        for kind in ("passed on", "chat"):
            asked, called = len(engine.asked), len(engine.calls)
            request = request_of(kind, kind)
            for size in range(len(request)):
                assert await rig.cut(request[:size], size % 4) is None
                await rig.settle((kind, size))
            assert len(engine.asked) == asked
            assert "/anything" not in [call.path for call in engine.calls[called:]]
            await rig.check_records(kind, kind)


@GRACE
async def test_hang_up_at_any_turn_leaves_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    notice_at_once(monkeypatch, grace_s)
    async with routed(start) as rig:
        for kind in KINDS:
            for turns in range(MOST_TURNS):
                step = f"{kind}, {turns} turns"
                rig.engine.script = [(503, b"{}")] if kind == "tried again" else []
                answer = await rig.cut(request_of(kind, step), turns)
                await rig.settle(step)
                rig.engine.script = []
                await rig.check_records(kind, step)
                await rig.settle(step)
                if answer is not None:
                    break
            assert 5 < turns < MOST_TURNS - 1, kind


@GRACE
async def test_hang_up_while_the_engine_is_silent_leaves_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """The engine answers only once the router has told it to abort the request."""
    notice_at_once(monkeypatch, grace_s)
    async with routed(start) as rig:
        for kind in [*KINDS][1:]:
            for turns in range(0, 20, 3):  # the engine has the request by then
                step = f"{kind}, {turns} turns"
                rig.engine.delay = anyio.Event()
                assert await rig.cut(request_of(kind, step), turns) is None
                await rig.settle(step)
                rig.engine.delay = None
                await rig.check_records(kind, step)
                await rig.settle(step)
