"""``--request-id-headers``: each request has an id, which the worker, the client and the log know."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router_core.cli import build
from router_core.errors import SettingsError
from router_core.request_ids import DEFAULT_HEADERS
from router_core.types import Receive, Scope, Send
from routers import Start
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio


class HeaderRecorder:
    """Keeps the headers that it got, and answers with ids of its own."""

    def __init__(self) -> None:
        self.got: list[list[tuple[str, str]]] = []
        self.app = Starlette(
            routes=[Route("/model_info", lambda _: Response()), Route("/{path:path}", self._answer)]
        )

    async def _answer(self, request: Request) -> Response:
        self.got.append(request.headers.items())
        if request.url.path == "/breaks":
            return StreamingResponse(self._breaking())
        return Response(b"answer", headers={"x-mine": "yes", "X-Request-Id": "the worker's"})

    async def _breaking(self) -> AsyncIterator[bytes]:
        yield b"a beginning"
        raise ConnectionError("a test")

    @property
    def last(self) -> dict[str, list[str]]:
        """The headers of the last request, each with all its values."""
        values: dict[str, list[str]] = {}
        for name, value in self.got[-1]:
            values.setdefault(name, []).append(value)
        return values


@asynccontextmanager
async def before(start: Start, worker: HeaderRecorder, *flags: str) -> AsyncIterator[Running]:
    async with serving(worker.app) as url, start("--disable-health-check", *flags) as running:
        await running.router.add_worker(url)
        yield running


def ids(answer: httpx.Response) -> list[str]:
    return answer.headers.get_list("x-request-id")


@pytest.mark.parametrize("name", DEFAULT_HEADERS)
async def test_an_id_that_came_is_passed_on_and_given_back(start: Start, name: str) -> None:
    worker = HeaderRecorder()
    async with before(start, worker, "--request-id-headers") as running:
        answer = await running.client.get("/", headers={name: "of mine"})
    assert ids(answer) == ["of mine"]
    assert {key: values for key, values in worker.last.items() if key in DEFAULT_HEADERS} == {
        name: ["of mine"]
    }
    assert (answer.content, answer.headers["x-mine"]) == (b"answer", "yes")


async def test_a_request_without_an_id_gets_one(start: Start) -> None:
    worker = HeaderRecorder()
    async with before(start, worker, "--request-id-headers", "X-Trace-Id", "x-other") as running:
        answers = [await running.client.get("/", headers={"x-request-id": "no name of it"}) for _ in range(3)]
    made = [ids(answer)[0] for answer in answers]
    assert [ids(answer) for answer in answers] == [[each] for each in made]
    assert len({*made}) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    assert [dict(got)["x-trace-id"] for got in worker.got] == made
    assert worker.last["x-request-id"] == ["no name of it"]


async def test_the_first_header_of_the_flag_that_has_an_id_counts(start: Start) -> None:
    worker = HeaderRecorder()
    async with before(start, worker, "--request-id-headers", "x-a", "x-b") as running:
        both = await running.client.get("/", headers={"x-b": "b", "x-a": "a"})
        empty = await running.client.get("/", headers={"x-b": "b", "x-a": ""})
        odd = await running.client.get("/", headers=[(b"x-b", b"caf\xc3\xa9"), (b"x-a", b"a" * 257)])
    assert [ids(both), ids(empty)] == [["a"], ["b"]]
    assert worker.last["x-a"] == ids(odd)


async def test_a_generation_that_a_plugin_makes_has_the_id_of_its_request(
    start: Start, tmp_path: Path
) -> None:
    model = load_model()
    model.tokenizer.save(tmp_path)
    engine = make_app(Settings(), lambda: model)
    got: list[list[tuple[bytes, bytes]]] = []

    async def keeping(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/generate":
            got.append(scope["headers"])
        await engine(scope, receive, send)

    plugins = ("--plugin", "radix_cache", "--plugin", "openai", "--hf-checkpoint", str(tmp_path))
    async with serving(keeping) as url, start(*plugins, "--request-id-headers", "x-a", "x-b") as running:
        await running.router.add_worker(url)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
        for headers in ({"x-b": "mine", **trace}, {}):
            answer = await running.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    assert (b"x-b", b"mine") in got[0]
    assert {name: value for name, value in got[0] if name.decode() in trace} == {
        name.encode(): value.encode() for name, value in trace.items()
    }
    assert (b"x-a", ids(answer)[0].encode()) in got[1]


async def test_errors_and_the_routers_own_answers_have_it_too(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start("--request-id-headers", "--api-key", "key", "--max-payload-size", "10") as running:
        named = {"x-request-id": "mine", "Authorization": "Bearer key"}
        with caplog.at_level(logging.WARNING):
            answers = [
                await running.client.post("/generate", headers=named),
                await running.client.post("/generate", headers={"x-request-id": "mine"}),
                await running.client.post("/generate", headers=named, content=b"x" * 11),
                await running.client.get("/health", headers=named),
            ]
    assert [answer.status_code for answer in answers] == [503, 401, 413, 200]
    assert [ids(answer) for answer in answers] == [["mine"]] * 4
    assert [line for line in caplog.messages if line.startswith("[mine] POST /generate: 503, no worker")]


async def test_a_line_about_an_answer_that_broke_off_begins_with_it(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    worker = HeaderRecorder()
    async with before(start, worker, "--request-id-headers") as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.get("/breaks", headers={"x-request-id": "mine"})
    assert [line for line in caplog.messages if line.startswith("[mine] a reply broke off")]


async def test_without_the_flag_nothing_is_added(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    worker = HeaderRecorder()
    async with before(start, worker) as running:
        answer = await running.client.get("/")
        assert ids(answer) == ["the worker's"]
        assert not {*DEFAULT_HEADERS} & {*worker.last}
        running.router.pool.remove(next(iter(running.router.pool)))
        assert ids(await running.client.get("/", headers={"x-request-id": "mine"})) == []
    assert [line for line in caplog.messages if line.startswith("GET /: 503")]


def test_a_name_that_is_none_is_told() -> None:
    with pytest.raises(SettingsError, match="--request-id-headers: wanted names of headers, got 'a: b'"):
        build(["--request-id-headers", "x-a", "a: b"])
