"""Every generation has a name, and an abort goes where the request is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from starlette.responses import StreamingResponse

from core.servers import Wire, answer, scripted
from plugged import Recording, routing, until
from router_core import Exchange, Request
from router_core.types import ASGIApp
from slime_control import Control, Settings
from slime_control.pausing.under_way import UnderWay, renamed_by_the_engine
from slime_http.serving import serving
from slime_retries import Retries
from slime_retries import Settings as RetrySettings
from slime_testing import FakeEngine, Running

pytestmark = pytest.mark.anyio

BIG = 123456789012345678901234567890


def busy() -> FakeEngine:
    """Return an engine that generates until it gets an abort."""
    engine = FakeEngine()
    engine.rest = lambda _: {"text": ""}
    engine.delay = anyio.Event()
    return engine


def aborts_of(engine: FakeEngine) -> list[Any]:
    return [orjson.loads(call.body) for call in engine.calls if call.path == "/abort_request"]


@asynccontextmanager
async def controlled(*workers: ASGIApp, **plugins: object) -> AsyncIterator[tuple[Running, list[str]]]:
    """Yield a router before ``workers``, and their URLs."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
        running = await stack.enter_async_context(routing({"control": Control(Settings()), **plugins}))
        for url in urls:
            await running.router.add_worker(url)
        yield running, urls


@pytest.mark.parametrize("path", ["/generate", "/generate?a=1", "/v1/chat/completions", "/v1/completions"])
async def test_a_request_without_a_name_gets_one_and_is_else_untouched(path: str) -> None:
    worker = Recording()
    async with controlled(worker) as (running, _):
        for _ in range(2):
            await running.client.post(path, content=b' {"text":"\xc3\xa9" , "big":%d}' % BIG)
    names = [orjson.loads(body.replace(b"%d" % BIG, b"0"))["rid"] for body in worker.bodies]
    assert worker.bodies == [
        b' {"rid":"%s","text":"\xc3\xa9" , "big":%d}' % (name.encode(), BIG) for name in names
    ]
    assert len(set(names)) == 2
    assert not names[0].startswith(names[1])
    assert len(names[0]) == len(names[1]) == 32


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": "a",  "rid": "mine"}'),
        ("/generate", b'{"text": ["a"],  "rid": ["b"]}'),
        ("/generate", b"not JSON"),
        ("/generate", b"[1]"),
        ("/tokenize", b'{"text":  "a"}'),
        ("/v1/embeddings", b'{"input":  "a"}'),
    ],
)
async def test_what_has_a_name_or_needs_none_passes_byte_for_byte(path: str, body: bytes) -> None:
    worker = Recording()
    async with controlled(worker) as (running, _):
        await running.client.post(path, content=body)
    assert worker.bodies == [body]


@pytest.mark.parametrize("paused", [False, True], ids=["", "while generation is paused"])
async def test_a_name_is_refused_that_is_too_long_to_be_kept(paused: bool) -> None:
    worker = Recording()
    async with controlled(worker) as (running, _):
        if paused:
            running.router.components.get("pending_aborts").gate.close()
        for path, rid in (
            ("/generate", "é" * 513),
            ("/generate", ["a", "b" * 1026]),
            ("/v1/completions", "a" * 1026),
            ("/abort_request", "a" * 1026),
        ):
            answer = await running.client.post(path, json={"text": ["a", "b"], "rid": rid})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == '"rid" has at most 1024 bytes, got 1026'
        running.router.components.get("pending_aborts").gate.open()
        assert worker.requests == []
        assert (await running.client.post("/generate", json={"text": "a", "rid": "a" * 1024})).is_success


async def test_a_rid_that_stands_deeper_is_no_name() -> None:
    worker = Recording()
    async with controlled(worker) as (running, _):
        await running.client.post("/generate", content=b'{"text": "a", "custom": {"rid": "x"}}')
    assert orjson.loads(worker.bodies[0])["rid"] != "x"


@pytest.mark.parametrize(
    ("name", "prefix"), [("a1", "a1"), ("a1", "a"), (["a1", "b1"], "b1"), ("a1", "a1_3")],
    ids=["whole", "beginning", "one of a list", "one of a batch"],
)  # fmt: skip
async def test_an_abort_goes_to_the_worker_that_has_the_request(name: object, prefix: str) -> None:
    engines = [busy(), busy(), busy()]
    async with (
        controlled(*(one.app for one in engines)) as (running, urls),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": name}))
        await until(lambda: any(engine.asked for engine in engines))
        answer = await running.client.post("/abort_request", json={"rid": prefix})
        [url] = [url for url, engine in zip(urls, engines, strict=True) if engine.asked]
        assert list(answer.json()["workers"]) == [url]
        assert [aborts_of(engine) for engine in engines if not engine.asked] == [[], []]


async def test_abort_reaches_a_removed_worker_that_still_has_the_request() -> None:
    async with controlled(busy().app, busy().app) as (running, _), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": "a1"}))
        await until(lambda: any(worker.in_flight for worker in running.router.pool))
        [leaving] = [worker for worker in running.router.pool if worker.in_flight]
        running.router.pool.remove(leaving)
        answer = await running.client.post("/abort_request", json={"rid": "a1"})
        assert (answer.status_code, list(answer.json()["workers"])) == (200, [leaving.url])


async def test_an_abort_of_an_unknown_name_and_of_all_goes_to_everybody() -> None:
    engines = [busy(), busy()]
    async with controlled(*(one.app for one in engines)) as (running, _), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": "a1"}))
        await until(lambda: any(engine.asked for engine in engines))
        for body in ({"rid": "zzz"}, {"abort_all": True}, {"rid": "a1", "abort_all": True}):
            answer = await running.client.post("/abort_request", json=body)
            assert len(answer.json()["workers"]) == 2


async def test_names_are_forgotten_with_their_requests() -> None:
    under_way = UnderWay(list)
    one, two = (Exchange(Request("POST", b"/generate", [], b'{"rid": "same"}')) for _ in range(2))
    under_way.ensure_rid(one)
    under_way.ensure_rid(two)
    one.close()
    assert under_way.workers("same") == []  # known, and with no worker now
    two.close()
    assert under_way.workers("same") is None


async def test_abort_of_one_sequence_between_attempts_spares_its_batch() -> None:
    under_way = UnderWay(list)
    named = Exchange(Request("POST", b"/generate", [], b'{"text": ["x", "y"], "rid": ["a1", "b1"]}'))
    numbered = Exchange(Request("POST", b"/generate", [], b'{"text": ["x", "y"], "rid": "c"}'))
    under_way.ensure_rid(named)
    under_way.ensure_rid(numbered)
    gone = []
    for prefix in ("a1", "c_0", "c", ""):
        under_way.give_up(prefix)
        gone.append((named.client_disconnected, numbered.client_disconnected))
    assert gone == [(False, False), (False, False), (False, True), (True, True)]


async def test_a_stream_that_breaks_off_is_ended_at_its_engine() -> None:
    """It is noticed in a callback of the connection, where there is no task."""

    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"text": "a"}\n\n'
        await anyio.sleep(0.1)
        raise ConnectionError

    engine = FakeEngine()
    engine.script.append(StreamingResponse(events()))
    async with controlled(engine.app) as (running, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.post("/generate", json={"text": "x", "rid": "a1", "stream": True})
        await until(lambda: aborts_of(engine) == [{"rid": "a1"}])


async def test_a_worker_with_a_key_is_shown_it_by_control_calls_too() -> None:
    worker = Recording()
    async with controlled() as (running, _), serving(worker) as url:
        await running.client.post("/workers", json={"url": url, "api_key": "sesame"})
        await running.client.post("/abort_request", json={"abort_all": True})
        mine = {"authorization": "Bearer my own"}
        await running.client.post("/abort_request", json={"abort_all": True}, headers=mine)
        keys = [headers["authorization"] for path, headers, _ in worker.requests if path == "/abort_request"]
        assert keys == ["Bearer sesame", "Bearer my own"]
        running.router.pool.remove(next(iter(running.router.pool)))


@pytest.mark.parametrize(
    "body", [b'["rid", "n"]', b'{"n"', b'{"rid": "a", "n": "n", "sampling_params": "n"}']
)
def test_what_is_no_request_asks_for_no_samples(body: bytes) -> None:
    assert not renamed_by_the_engine(Request("POST", b"/generate", [], body))


async def test_an_abort_between_two_attempts_ends_the_request() -> None:
    """No worker has it then, and none is to be asked again."""

    engine = FakeEngine()
    engine.rest = lambda _: (503, b"busy")
    retries = Retries(RetrySettings(attempts=5, initial_backoff_ms=500, jitter=0))
    answers: list[httpx.Response] = []
    async with controlled(engine.app, retries=retries) as (running, _):

        async def ask() -> None:
            answers.append(await running.client.post("/generate", json={"text": "x", "rid": "a1"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(engine.asked))
            await until(lambda: not any(worker.in_flight for worker in running.router.pool))
            await running.client.post("/abort_request", json={"rid": "a1"})
    assert [answer.json()["error"]["code"] for answer in answers] == ["ABORTED"]
    assert len(engine.asked) == 1


@asynccontextmanager
async def trying_again() -> AsyncIterator[tuple[Running, list[str]]]:
    """Yield a router before a worker that breaks its first answer and takes its time for aborts, and their order."""
    order: list[str] = []

    async def script(wire: Wire) -> None:
        while request := await wire.request():
            if b"/abort_request" in request.line:
                await anyio.sleep(0.5)
                order.append("ended")
                await wire.send(answer(b""))
            elif b"/generate" in request.line:
                order.append("asked")
                if order == ["asked"]:
                    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")
                    return
                await wire.send(answer(b'{"text":"whole"}'))
            else:
                await wire.send(answer(b"{}"))

    retries = Retries(RetrySettings(initial_backoff_ms=10))
    async with scripted(script) as worker, controlled(retries=retries) as (running, _):
        await running.router.add_worker(worker.url)
        yield running, order


async def test_attempt_on_the_same_worker_waits_for_the_end_of_the_previous() -> None:
    """Under the same name it would be ended too."""
    async with trying_again() as (running, order):
        reply = await running.client.post("/generate", json={"text": "x", "rid": "a1"})
    assert reply.json() == {"text": "whole"}
    assert order == ["asked", "ended", "asked"]


async def test_nothing_is_tried_again_for_a_client_that_leaves_meanwhile() -> None:
    async with trying_again() as (running, order):
        with anyio.move_on_after(0.2):
            await running.client.post("/generate", json={"text": "x", "rid": "a1"})
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
    assert order.count("asked") == 1


async def test_a_null_is_no_name() -> None:
    """As a dumped ``GenerateReqInput`` has it."""
    worker = Recording()
    async with controlled(worker) as (running, _):
        await running.client.post("/generate", content=b'{"text": "a", "rid": null}')
    sent = orjson.loads(worker.bodies[0])
    assert sent["text"] == "a"
    assert len(sent["rid"]) == 32
    assert worker.bodies[0].count(b'"rid"') == 1
