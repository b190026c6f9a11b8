"""Every generation has a name, and an abort goes where the request is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from plugged import routing, until
from router_core import Exchange
from router_core import Request as Asked
from slime_control import Control, Settings
from slime_control.pausing.under_way import UnderWay, renamed_by_the_engine
from slime_http.serving import serving
from slime_retries import Retries
from slime_retries import Settings as RetrySettings
from slime_testing import Running

pytestmark = pytest.mark.anyio

BIG = 123456789012345678901234567890


class Engine:
    """Generates until somebody aborts; knows nothing of names."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.aborts: list[Any] = []
        self.keys: list[str | None] = []
        self.over = anyio.Event()
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/model_info", self._info),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/{path:path}", self._generate, methods=["POST"]),
            ]
        )

    async def _info(self, _: Request) -> Response:
        return JSONResponse({})

    async def _abort(self, request: Request) -> Response:
        self.aborts.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        self.over.set()
        return Response()

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        await self.over.wait()
        return JSONResponse({"text": ""})


@asynccontextmanager
async def controlled(*engines: Engine) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.url = await stack.enter_async_context(serving(engine.app))
        running = await stack.enter_async_context(routing({"control": Control(Settings())}))
        for engine in engines:
            await running.router.add_worker(engine.url)
        yield running


@pytest.mark.parametrize("path", ["/generate", "/generate?a=1", "/v1/chat/completions", "/v1/completions"])
async def test_a_request_without_a_name_gets_one_and_is_else_untouched(path: str) -> None:
    engine = Engine()
    engine.over.set()
    async with controlled(engine) as running:
        for _ in range(2):
            await running.client.post(path, content=b' {"text":"\xc3\xa9" , "big":%d}' % BIG)
    names = [orjson.loads(body.replace(b"%d" % BIG, b"0"))["rid"] for body in engine.bodies]
    assert engine.bodies == [
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
    engine = Engine()
    engine.over.set()
    async with controlled(engine) as running:
        await running.client.post(path, content=body)
    assert engine.bodies == [body]


@pytest.mark.parametrize("paused", [False, True], ids=["", "while generation is paused"])
async def test_a_name_is_refused_that_is_too_long_to_be_kept(paused: bool) -> None:
    engine = Engine()
    engine.over.set()
    async with controlled(engine) as running:
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
        assert engine.bodies == engine.aborts == []
        assert (await running.client.post("/generate", json={"text": "a", "rid": "a" * 1024})).is_success


async def test_a_rid_that_stands_deeper_is_no_name() -> None:
    engine = Engine()
    engine.over.set()
    async with controlled(engine) as running:
        await running.client.post("/generate", content=b'{"text": "a", "custom": {"rid": "x"}}')
    assert orjson.loads(engine.bodies[0])["rid"] != "x"


@pytest.mark.parametrize(
    ("name", "prefix"), [("a1", "a1"), ("a1", "a"), (["a1", "b1"], "b1"), ("a1", "a1_3")],
    ids=["whole", "beginning", "one of a list", "one of a batch"],
)  # fmt: skip
async def test_an_abort_goes_to_the_worker_that_has_the_request(name: object, prefix: str) -> None:
    engines = [Engine(), Engine(), Engine()]
    async with controlled(*engines) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": name}))
        await until(lambda: any(engine.bodies for engine in engines))
        answer = await running.client.post("/abort_request", json={"rid": prefix})
        [busy] = [engine for engine in engines if engine.bodies]
        assert list(answer.json()["workers"]) == [busy.url]
        assert [engine.aborts for engine in engines if engine is not busy] == [[], []]


async def test_abort_reaches_a_removed_worker_that_still_has_the_request() -> None:
    engine = Engine()
    async with controlled(engine, Engine()) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": "a1"}))
        await until(lambda: any(worker.in_flight for worker in running.router.pool))
        [busy] = [worker for worker in running.router.pool if worker.in_flight]
        running.router.pool.remove(busy)
        answer = await running.client.post("/abort_request", json={"rid": "a1"})
        assert (answer.status_code, list(answer.json()["workers"])) == (200, [busy.url])


async def test_an_abort_of_an_unknown_name_and_of_all_goes_to_everybody() -> None:
    engines = [Engine(), Engine()]
    async with controlled(*engines) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json={"text": "x", "rid": "a1"}))
        await until(lambda: any(engine.bodies for engine in engines))
        for body in ({"rid": "zzz"}, {"abort_all": True}, {"rid": "a1", "abort_all": True}):
            answer = await running.client.post("/abort_request", json=body)
            assert len(answer.json()["workers"]) == 2


async def test_names_are_forgotten_with_their_requests() -> None:
    under_way = UnderWay(list)
    one, two = (Exchange(Asked("POST", b"/generate", [], b'{"rid": "same"}')) for _ in range(2))
    under_way.name(one)
    under_way.name(two)
    one.close()
    assert under_way.workers("same") == []  # known, and with no worker now
    two.close()
    assert under_way.workers("same") is None


async def test_abort_of_one_sequence_between_attempts_spares_its_batch() -> None:
    under_way = UnderWay(list)
    named = Exchange(Asked("POST", b"/generate", [], b'{"text": ["x", "y"], "rid": ["a1", "b1"]}'))
    numbered = Exchange(Asked("POST", b"/generate", [], b'{"text": ["x", "y"], "rid": "c"}'))
    under_way.name(named)
    under_way.name(numbered)
    gone = []
    for prefix in ("a1", "c_0", "c", ""):
        under_way.give_up(prefix)
        gone.append((named.client_disconnected, numbered.client_disconnected))
    assert gone == [(False, False), (False, False), (False, True), (True, True)]


async def test_a_stream_that_breaks_off_is_ended_at_its_engine() -> None:
    """It is noticed in a callback of the connection, where there is no task."""

    class Breaking(Engine):
        async def _generate(self, request: Request) -> Response:
            self.bodies.append(await request.body())

            async def events() -> AsyncIterator[bytes]:
                yield b'data: {"text": "a"}\n\n'
                await anyio.sleep(0.1)
                raise ConnectionError

            return StreamingResponse(events())

    engine = Breaking()
    async with controlled(engine) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.post("/generate", json={"text": "x", "rid": "a1", "stream": True})
        await until(lambda: engine.aborts == [{"rid": "a1"}])


async def test_a_worker_with_a_key_is_shown_it_by_control_calls_too() -> None:
    engine = Engine()
    async with controlled() as running, serving(engine.app) as url:
        await running.client.post("/workers", json={"url": url, "api_key": "sesame"})
        await running.client.post("/abort_request", json={"abort_all": True})
        mine = {"authorization": "Bearer my own"}
        await running.client.post("/abort_request", json={"abort_all": True}, headers=mine)
        assert engine.keys == ["Bearer sesame", "Bearer my own"]
        running.router.pool.remove(next(iter(running.router.pool)))


@pytest.mark.parametrize(
    "body", [b'["rid", "n"]', b'{"n"', b'{"rid": "a", "n": "n", "sampling_params": "n"}']
)
def test_what_is_no_request_asks_for_no_samples(body: bytes) -> None:
    assert not renamed_by_the_engine(Asked("POST", b"/generate", [], body))


async def test_an_abort_between_two_attempts_ends_the_request() -> None:
    """No worker has it then, and none is to be asked again."""

    class Refuses(Engine):
        async def _generate(self, request: Request) -> Response:
            self.bodies.append(await request.body())
            return Response(b"busy", 503)

    engine = Refuses()
    retries = Retries(RetrySettings(attempts=5, initial_backoff_ms=500, jitter=0))
    answers: list[httpx.Response] = []
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine.app))
        plugins = {"control": Control(Settings()), "retries": retries}
        running = await stack.enter_async_context(routing(plugins))
        await running.router.add_worker(url)

        async def ask() -> None:
            answers.append(await running.client.post("/generate", json={"text": "x", "rid": "a1"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(engine.bodies))
            await until(lambda: not any(worker.in_flight for worker in running.router.pool))
            await running.client.post("/abort_request", json={"rid": "a1"})
    assert [answer.json()["error"]["code"] for answer in answers] == ["ABORTED"]
    assert len(engine.bodies) == 1


class Breaks(Engine):
    """Breaks its first answer, and takes its time for aborts; ``order`` is what it was asked and has done."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def _abort(self, request: Request) -> Response:
        await anyio.sleep(0.5)
        self.order.append("ended")
        return Response()

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.order.append("asked")
        if len(self.bodies) > 1:
            return JSONResponse({"text": "whole"})

        async def half() -> AsyncIterator[bytes]:
            yield b"half"
            raise ConnectionError

        return StreamingResponse(half(), headers={"content-length": "8"})


@asynccontextmanager
async def trying_again(engine: Breaks) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(engine.app))
        plugins = {"control": Control(Settings()), "retries": Retries(RetrySettings(initial_backoff_ms=10))}
        running = await stack.enter_async_context(routing(plugins))
        await running.router.add_worker(url)
        yield running


async def test_attempt_on_the_same_worker_waits_for_the_end_of_the_previous() -> None:
    """Under the same name it would be ended too."""
    engine = Breaks()
    async with trying_again(engine) as running:
        answer = await running.client.post("/generate", json={"text": "x", "rid": "a1"})
    assert answer.json() == {"text": "whole"}
    assert engine.order == ["asked", "ended", "asked"]


async def test_nothing_is_tried_again_for_a_client_that_leaves_meanwhile() -> None:
    engine = Breaks()
    async with trying_again(engine) as running:
        with anyio.move_on_after(0.2):
            await running.client.post("/generate", json={"text": "x", "rid": "a1"})
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
    assert engine.order.count("asked") == 1


async def test_a_null_is_no_name() -> None:
    """As a dumped ``GenerateReqInput`` has it."""
    engine = Engine()
    engine.over.set()
    async with controlled(engine) as running:
        await running.client.post("/generate", content=b'{"text": "a", "rid": null}')
    sent = orjson.loads(engine.bodies[0])
    assert sent["text"] == "a"
    assert len(sent["rid"]) == 32
    assert engine.bodies[0].count(b'"rid"') == 1
