"""The router's application on other ASGI servers than its own: answers, streams, and clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx
import orjson
import pytest

from core.asgi_router import make_router_app
from core.real import on_granian, on_uvicorn
from core.servers import Wire, answer, scripted
from deadlines import HANG_S
from http_.conversations import connected
from radix_cache.claims import NEXT, PROMPT, trained
from routers import BARE
from slime_engine.tokenizer import corpus_documents, train_tokenizer
from slime_http.serving import serving
from slime_testing import FakeEngine

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})]),
]

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
#: Each runs a router with a command line.
SERVERS: dict[str, Callable[..., AbstractContextManager[str]]] = {
    "uvicorn-h11": lambda *flags: on_uvicorn("h11", make_router_app(*flags)),
    "uvicorn-httptools": lambda *flags: on_uvicorn("httptools", make_router_app(*flags)),
    "granian": lambda *flags: on_granian("core.asgi_router:app", FLAGS=" ".join(flags)),
}


@dataclass
class EchoWorker:
    """A worker that echoes; at ``/stream`` in pieces, at ``/silent`` and ``/half`` it waits for the client to go."""

    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, wire: Wire) -> None:
        while request := await wire.request():
            path = request.line.split(b" ")[1]
            if path in (b"/stream", b"/half"):
                await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            if path in (b"/half", b"/silent"):
                await wire.until_closed()
                self.left.set()
                return
            if path == b"/stream":
                await self.go_on.wait()
                await wire.send(b"6\r\nsecond\r\n0\r\n\r\n")
                continue
            if path == b"/slow":
                await anyio.sleep(0.1)  # long enough to be watched for a client that hangs up
            await wire.send(answer(path + request.body, b"X-A: 1", b"X-A: 2"))


@asynccontextmanager
async def running(server: str, *flags: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run a router with ``flags`` on ``server``; a client of it once its worker has joined."""
    context = SERVERS[server](*flags)
    url = await anyio.to_thread.run_sync(context.__enter__)
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S) as client:
            with anyio.fail_after(HANG_S):
                while (await client.get("/readiness")).status_code != 200:  # noqa: ASYNC110  # in another process
                    await anyio.sleep(0.02)
            yield client
    finally:
        await anyio.to_thread.run_sync(context.__exit__, None, None, None)


@asynccontextmanager
async def served(server: str) -> AsyncIterator[tuple[EchoWorker, str, httpx.AsyncClient]]:
    worker = EchoWorker()
    async with (
        scripted(worker) as scripted_worker,
        running(server, *BARE, "--worker-urls", scripted_worker.url) as client,
    ):
        yield worker, str(client.base_url), client


@pytest.mark.parametrize("server", SERVERS)
async def test_the_application_runs_on_other_servers(server: str) -> None:
    async with served(server) as (worker, _, client):
        reply = await client.post("/echo", content=b"body")
        assert (reply.status_code, reply.content) == (200, b"/echobody")
        assert reply.headers.get_list("x-a") == ["1", "2"]
        assert (await client.head("/echo")).content == b""
        async with client.stream("GET", "/stream") as stream:
            pieces = stream.aiter_raw()
            assert await anext(pieces) == b"first"  # before the worker has said more
            worker.go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"second"


@pytest.mark.parametrize("server", SERVERS)
async def test_default_plugins_and_radix_cache_run_there(server: str) -> None:
    tokenizer = train_tokenizer(corpus_documents())
    engine = FakeEngine(tokenizer)
    first, second = [300, 301, 302], [303, 304, 305, 306]
    engine.script += [first, second]
    headers = {"x-session-id": "s"}
    flags = ("--plugin", "radix_cache", "--middleware-paths", "quick_tokenizer")
    async with (
        serving(engine.app) as worker,
        running(server, *flags, "--worker-urls", worker) as client,
    ):
        whole = (await client.post("/generate", json={"text": PROMPT}, headers=headers)).json()
        assert (whole["text"], whole["output_ids"]) == (tokenizer.decode(first), first)
        text = PROMPT + whole["text"] + NEXT
        body = {"text": text, "stream": True}
        async with client.stream("POST", "/generate", json=body, headers=headers) as stream:
            lines = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line]
        assert lines.pop() == "[DONE]"
        events = [orjson.loads(line) for line in lines]
        assert [event["output_ids"] for event in events] == [second[:end] for end in range(1, 5)]
        assert events[-1]["text"] == tokenizer.decode(second)
        told = await client.post("/retrieve_from_text", json={"text": text + events[-1]["text"]})
        answer = told.json()
        assert (answer["exact"], answer["inexact_reason"]) == (True, None)
        assert trained(answer) == first + second
        assert answer["tokens"] == engine.consumed[-1] + second
        assert engine.consumed[-1][: len(engine.consumed[0]) + 3] == engine.consumed[0] + first
        assert b"slime_router_" in (await client.get("/metrics")).content


@pytest.mark.parametrize("path", [b"silent", b"half"])
@pytest.mark.parametrize("server", SERVERS)
async def test_a_client_that_hangs_up_ends_its_request_there(server: str, path: bytes) -> None:
    async with served(server) as (worker, url, client):
        async with connected(url) as gone:
            await gone.say(GET % path)
            if path == b"half":
                assert not await gone.is_left_waiting(HANG_S)
            await anyio.sleep(0.2)
            assert not worker.left.is_set()
        with anyio.fail_after(HANG_S):
            await worker.left.wait()
        assert (await client.get("/next")).content == b"/next"


@pytest.mark.parametrize("server", SERVERS)
async def test_requests_that_were_watched_leave_no_task_there(server: str) -> None:
    async with served(server) as (_, _, client):

        async def tasks() -> int:
            return int((await client.get("/tasks")).content)

        await client.get("/slow")
        before = await tasks()
        for _ in range(8):
            assert (await client.get("/slow")).content == b"/slow"
        with anyio.fail_after(HANG_S):
            while await tasks() > before + 1:  # noqa: ASYNC110  # they are another thread's, or process's
                await anyio.sleep(0.02)
