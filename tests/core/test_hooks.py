"""Every hook, in a router on a socket; ``test_docs.py`` wants a ``test_hook_<name>`` for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import orjson
import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from core.servers import Wire, scripted
from holding import drain, quarantine, ready
from plugged import Recording, routing, until
from router_core import BadRequest, Exchange, HTTPError, Reply, Request, WeightUpdate, Worker, hookimpl
from router_core.app import make_app
from router_core.errors import PluginError, SettingsError, StartupError, WorkerBroke
from router_core.hooks import Hooks, hook_names, new_plugin_manager
from router_core.router import Router
from router_core.sender import Sender
from router_core.settings import Settings
from router_core.types import ASGIApp, Receive, Scope, Send
from router_core.workers import JOINING, WorkerChange

pytestmark = pytest.mark.anyio

#: Text that an error must not carry to the client.
SECRET = "the launch code is 0000"


async def _unused(_: StarletteRequest) -> Response:
    raise AssertionError("nobody asks for it")


def refused(plugin: object) -> str:
    """The one line with which a router with ``plugin`` does not start."""
    manager = new_plugin_manager()
    manager.register(plugin, "odd")
    with pytest.raises(StartupError) as failure:
        make_app(Router(Settings(), manager))
    return str(failure.value)


class Onion:
    """A layer that signs what passes, on the way in and on the way out."""

    def __init__(self, name: str, passed: list[str]) -> None:
        self.name = name
        self.passed = passed

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        self.passed.append(f"{self.name} in")
        await anyio.lowlevel.checkpoint()
        exchange.request.headers.append((b"x-layer", self.name.encode()))

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        self.passed.append(f"{self.name} out")


# pre_request


async def test_hook_pre_request() -> None:
    """Called in order, and the worker is sent what the hooks made of the request."""

    class Editor:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            request = exchange.request
            request.replace_json({**request.json(), "edited": "é"})
            request.headers.append((b"x-edited", b"yes"))
            request.target = b"/elsewhere?a=1"
            assert exchange.worker is None

    worker, passed = Recording(), list[str]()
    layers = {name: Onion(name, passed) for name in ("a", "b", "c")}
    async with routing({**layers, "editor": Editor()}, worker) as running:
        answer = await running.client.post("/generate", json={"text": "Hi"})
        assert answer.json() == {"worker": "worker"}
    assert passed == ["a in", "b in", "c in", "c out", "b out", "a out"]
    ((path, headers, body),) = worker.requests
    assert path == "/elsewhere"
    assert headers["x-edited"] == "yes"
    assert orjson.loads(body) == {"text": "Hi", "edited": "é"}
    assert int(headers["content-length"]) == len(body)


async def test_tryfirst_and_trylast_move_a_plugin_within_the_order() -> None:
    passed: list[str] = []

    def layer(name: str, *, tryfirst: bool = False, trylast: bool = False) -> object:
        class Layer:
            @hookimpl(tryfirst=tryfirst, trylast=trylast)
            async def pre_request(self) -> None:
                passed.append(name)

        return Layer()

    plugins = {
        "last": layer("last", trylast=True),
        "a": layer("a"),
        "very last": layer("very last", trylast=True),
        "b": layer("b"),
        "first": layer("first", tryfirst=True),
        "second": layer("second", tryfirst=True),
    }
    async with routing(plugins, Recording()) as running:
        await running.client.get("/")
    assert passed == ["first", "second", "a", "b", "last", "very last"]


async def test_a_plain_function_may_change_answer_or_wait() -> None:
    """``pre_request`` and ``post_response`` need not be async; what they return may be awaited."""

    class Plain:
        @hookimpl
        def pre_request(self, exchange: Exchange) -> object:
            request = exchange.request
            request.headers.append((b"x-plain", b"yes"))
            if request.path == "/later":
                return self._answer()
            return Reply.from_json({"from": "plain"}) if request.path == "/now" else None

        @hookimpl
        def post_response(self, exchange: Exchange) -> object:
            assert exchange.reply is not None
            exchange.reply.headers.append((b"x-seen", b"yes"))
            return self._stamp(exchange.reply) if exchange.request.path == "/later" else None

        async def _answer(self) -> Reply:
            await anyio.lowlevel.checkpoint()
            return Reply.from_json({"from": "later"})

        async def _stamp(self, reply: Reply) -> None:
            await anyio.lowlevel.checkpoint()
            reply.headers.append((b"x-late", b"yes"))

    worker, passed = Recording(), list[str]()
    async with routing({"plain": Plain(), "onion": Onion("onion", passed)}, worker) as running:
        answers = [await running.client.get(path) for path in ("/worker", "/now", "/later")]
    assert [answer.json() for answer in answers] == [
        {"worker": "worker"},
        {"from": "plain"},
        {"from": "later"},
    ]
    assert [answer.headers["x-seen"] for answer in answers] == ["yes"] * 3
    assert answers[2].headers["x-late"] == "yes"
    ((path, headers, _),) = worker.requests
    assert (path, headers["x-plain"]) == ("/worker", "yes")
    assert passed == ["onion in", "onion out", "onion out", "onion out"]


async def test_the_first_reply_wins_and_no_worker_is_asked() -> None:
    asked: list[str] = []

    class Answers:
        def __init__(self, name: str, reply: Reply | None) -> None:
            self.name, self.reply = name, reply

        @hookimpl
        async def pre_request(self, exchange: Exchange) -> Reply | None:
            asked.append(self.name)
            await anyio.lowlevel.checkpoint()
            return self.reply

    plugins = {
        "silent": Answers("silent", None),
        "first": Answers("first", Reply.from_json({"from": "first"}, 202, [(b"x-from", b"first")])),
        "second": Answers("second", Reply.from_json({"from": "second"})),
    }
    worker, passed = Recording(), list[str]()
    async with routing({**plugins, "onion": Onion("onion", passed)}, worker) as running:
        answer = await running.client.post("/generate", json={})
        assert (answer.status_code, answer.json(), answer.headers["x-from"]) == (
            202,
            {"from": "first"},
            "first",
        )
    assert asked == ["silent", "first"]  # an async function that returns None has not answered
    assert passed == ["onion out"]  # a reply is a reply: post_response sees it
    assert worker.requests == []


async def test_a_json_body_that_two_plugins_replace_is_encoded_once() -> None:
    seen: list[bytes] = []

    class Adds:
        def __init__(self, key: str) -> None:
            self.key = key

        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            exchange.request.replace_json({**exchange.request.json(), self.key: -1e-5})

    class Looks:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            request = exchange.request
            seen.append(request.body)
            assert request.body is seen[0], "the same bytes, not encoded again"

    worker = Recording()
    plugins = {"a": Adds("é"), "b": Adds("b"), "looks": Looks(), "looks_too": Looks()}
    async with routing(plugins, worker) as running:
        answer = await running.client.post("/generate", content=b'{ "text" : "Hi" }')
        assert answer.is_success
    ((_, headers, body),) = worker.requests
    assert orjson.loads(body) == {"text": "Hi", "é": -1e-5, "b": -1e-5}
    assert headers["content-length"] == str(len(body))
    assert body == seen[0]


# select_worker


async def test_hook_select_worker() -> None:
    """The first choice wins; it is asked with the workers that may be used now."""
    offered: list[list[str]] = []

    class Chooses:
        def __init__(self, wanted: str | None) -> None:
            self.wanted = wanted

        @hookimpl
        def select_worker(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker | None:
            offered.append([worker.labels["name"] for worker in workers])
            return next((worker for worker in workers if worker.labels["name"] == self.wanted), None)

    plugins = {"none": Chooses(None), "b": Chooses("b"), "c": Chooses("c")}
    async with routing(plugins, Recording("a"), Recording("b"), Recording("c")) as running:
        for worker, name in zip(running.router.pool, "abc", strict=True):
            worker.labels["name"] = name
        names = [(await running.client.get("/")).json()["worker"] for _ in range(5)]
        assert names == ["b"] * 5
        assert offered == [["a", "b", "c"]] * 10  # by two plugins each; the third one was never asked

        (b,) = [worker for worker in running.router.pool if worker.labels["name"] == "b"]
        quarantine(running.router.pool, b, "dead")
        assert (await running.client.get("/")).json()["worker"] == "c"
        assert offered[-1] == ["a", "c"]


async def test_a_session_keeps_its_worker_without_asking_again() -> None:
    asked = 0

    class Counts:
        @hookimpl
        def select_worker(self, workers: Sequence[Worker]) -> Worker:
            nonlocal asked
            asked += 1
            return workers[asked % 2]

    async with routing({"counts": Counts()}, Recording("a"), Recording("b")) as running:
        session = {"x-session-id": "s"}
        names = {(await running.client.get("/", headers=session)).json()["worker"] for _ in range(6)}
        assert len(names) == 1
        assert asked == 1


# sender


async def test_hook_sender() -> None:
    """The first plugin's is the outermost; it gets each request that is for a worker, chooses and asks."""
    made: list[str] = []

    class Layer:
        def __init__(self, inner: Sender) -> None:
            self.inner = inner

        def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
            self.inner.choose(exchange, but)

        async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
            if request.path != "/twice":
                return await self.inner.send(exchange, request, body)
            assert exchange.worker is not None
            first = exchange.worker
            (await self.inner.send(exchange, request)).close()
            self.inner.choose(exchange, but=[first])
            assert first.in_flight == 0
            return await self.inner.send(exchange, request)

    class Twice:
        @hookimpl
        def sender(self, inner: Sender) -> Sender:
            made.append("twice")
            return Layer(inner)

    class Never:
        @hookimpl
        def sender(self, inner: Sender, router: Router) -> Sender:
            made.append("never")
            assert inner is router.proxy
            return inner

    workers = Recording("a"), Recording("b")
    async with routing({"twice": Twice(), "never": Never()}, *workers) as running:
        assert made == ["never", "twice"]
        last = (await running.client.post("/twice", content=b"body")).json()["worker"]
        bodies = {worker.name: worker.bodies for worker in workers}
        assert bodies == {"a": [b"body"], "b": [b"body"]}
        assert last in bodies
        assert (await running.client.get("/once")).status_code == 200  # which the core does


async def test_a_sender_that_is_none_ends_the_start() -> None:
    class Forgets:
        @hookimpl
        def sender(self, inner: Sender) -> None:
            pass

    manager = new_plugin_manager()
    manager.register(Forgets(), "forgets")
    with pytest.raises(
        PluginError, match="plugin 'forgets' failed in sender: TypeError: returned None; wanted"
    ):
        Router(Settings(), manager)


# attempt_failed


async def test_hook_attempt_failed() -> None:
    """Tells what a worker did, and what the router gave up, once each; whole answers are no failures."""
    told: list[tuple[str, str | None]] = []

    class Listens:
        @hookimpl
        def attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
            told.append((request.path, type(error).__name__ if error is not None else None))
            raise RuntimeError("which is logged")

    class Closes:
        @hookimpl
        async def post_response(self, exchange: Exchange) -> None:
            if exchange.request.path == "/stream":
                exchange.reply = Reply(200, [], b"enough")

    async with routing({"listens": Listens(), "closes": Closes()}, Recording()) as running:
        assert (await running.client.get("/")).status_code == 200
        assert told == []
        assert (await running.client.get("/stream")).content == b"enough"
        assert told == [("/stream", None)]
        [worker] = running.router.pool
        running.router.pool.remove(worker)
        dead, _ = await running.router.add_worker("http://127.0.0.1:9")
        ready(running.router.pool, dead)  # it answered once
        assert (await running.client.get("/nobody")).status_code == 502
        assert told[1:] == [("/nobody", "WorkerUnreachable")]


@pytest.mark.parametrize("rest", [b"ZZZ\r\n", b"3\r\none\r\nZZZ\r\n"], ids=["at once", "after a piece"])
async def test_answer_that_breaks_as_it_begins_is_reported_once(rest: bytes) -> None:
    told: list[HTTPError | None] = []

    class Listens:
        @hookimpl
        def attempt_failed(self, error: HTTPError | None) -> None:
            told.append(error)

    async def broken(wire: Wire) -> None:
        if await wire.request():
            await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + rest)
            await wire.until_closed()

    async with scripted(broken) as worker, routing({"listens": Listens()}) as running:
        await running.router.add_worker(worker.url)
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.get("/")
        assert [type(error) for error in told] == [WorkerBroke]


# client_gone


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
async def test_hook_client_gone(told: bool) -> None:
    """A client's leaving is told once; a worker that was told to stop may still say what it has."""
    gone: list[bool] = []
    kept: list[bytes | None] = []
    may_end = anyio.Event()

    class Late(Recording):
        async def _answer(self, request: StarletteRequest) -> Response:
            await may_end.wait()
            return PlainTextResponse("partial")

    class Tells:
        @hookimpl
        def client_gone(self, exchange: Exchange) -> bool:
            assert exchange.worker is not None
            gone.append(exchange.client_disconnected)
            may_end.set()
            return told

        @hookimpl
        async def post_response(self, exchange: Exchange) -> None:
            assert exchange.reply is not None
            kept.append(await exchange.reply.read())

    async with routing({"tells": Tells()}, Late()) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.get("/", timeout=0.3)
        await until(lambda: bool(gone))
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
    assert gone == [True]
    assert kept == ([b"partial"] if told else [])


async def test_an_engine_that_does_not_stop_is_left_after_two_seconds() -> None:
    over = anyio.Event()

    class Deaf(Recording):
        async def _answer(self, request: StarletteRequest) -> Response:
            await over.wait()
            return Response()

    class Tells:
        @hookimpl
        def client_gone(self) -> bool:
            return True

    async with routing({"tells": Tells()}, Deaf()) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.get("/", timeout=0.3)
        [worker] = running.router.pool
        assert worker.in_flight == 1
        await until(lambda: worker.in_flight == 0)
        await until(lambda: running.router.proxy.open_connections == 0)
        over.set()


# post_response


async def test_hook_post_response() -> None:
    """Sees the reply before the client, and may change status, headers and body."""

    class Changes:
        @hookimpl
        async def post_response(self, exchange: Exchange) -> None:
            reply = exchange.reply
            assert reply is not None
            assert exchange.worker is not None
            seen = orjson.loads(await reply.read())
            reply.status = 203
            reply.headers.append((b"x-worker", exchange.worker.url.encode()))
            reply.replace_body(orjson.dumps({**seen, "more": "é" * 100}))

    async with routing({"changes": Changes()}, Recording()) as running:
        answer = await running.client.get("/")
        assert (answer.status_code, answer.json()) == (203, {"worker": "worker", "more": "é" * 100})
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.headers["x-worker"] == next(iter(running.router.pool)).url


async def test_a_reply_that_is_only_read_passes_unchanged() -> None:
    class Reads:
        @hookimpl
        async def post_response(self, exchange: Exchange) -> None:
            assert exchange.reply is not None
            assert exchange.reply.body is None  # a stream until somebody reads it
            assert await exchange.reply.read() == b"one two three"
            assert exchange.reply.body == await exchange.reply.read()

    async with routing({"reads": Reads(), "reads_too": Onion("x", [])}, Recording()) as running:
        assert (await running.client.get("/stream")).content == b"one two three"


async def test_on_close_runs_once_however_the_exchange_ends() -> None:
    ended: list[str] = []

    class Cleans:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> Reply | None:
            path = exchange.request.path
            exchange.on_close(lambda: ended.append(path))
            if path == "/refused":
                raise BadRequest("no")
            return Reply.from_json({}) if path == "/answered" else None

    async with routing({"cleans": Cleans()}, Recording()) as running:
        for path in ("/proxied", "/answered", "/refused", "/stream"):
            await running.client.get(path)
        await until(lambda: len(ended) == 4)
        assert ended == ["/proxied", "/answered", "/refused", "/stream"]


# errors in the hooks of a request


class Raises:
    """Raises ``error`` in the hook ``where``."""

    def __init__(self, where: str, error: Exception) -> None:
        self.where, self.error = where, error

    def _raise_in(self, hook: str) -> None:
        if self.where == hook:
            raise self.error

    @hookimpl
    async def pre_request(self) -> None:
        self._raise_in("pre_request")

    @hookimpl
    def select_worker(self) -> None:
        self._raise_in("select_worker")

    @hookimpl
    async def post_response(self) -> None:
        self._raise_in("post_response")

    @hookimpl
    async def on_weight_update(self) -> None:
        self._raise_in("on_weight_update")

    @hookimpl
    def worker_changed(self) -> None:
        self._raise_in("worker_changed")


@pytest.mark.parametrize("where", ["pre_request", "select_worker", "post_response"])
async def test_an_error_in_a_hook_names_the_plugin_and_nothing_else(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with routing({"clumsy": Raises(where, ValueError(SECRET))}, Recording()) as running:
        answer = await running.client.post("/generate", json={})
        assert answer.status_code == 500
        assert answer.json() == {
            "error": {
                "message": f"plugin 'clumsy' failed in {where}; the router's log has the traceback",
                "type": "plugin_error",
                "code": "PLUGIN_FAILED",
            }
        }
        assert [worker.in_flight for worker in running.router.pool] == [0]
    assert SECRET in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("where", ["pre_request", "select_worker", "post_response"])
async def test_an_http_error_of_a_hook_reaches_the_client_as_it_is(where: str) -> None:
    async with routing({"strict": Raises(where, BadRequest("no such session"))}, Recording()) as running:
        answer = await running.client.post("/generate", json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "no such session"
        assert [worker.in_flight for worker in running.router.pool] == [0]


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_reply_of_the_wrong_type_is_the_plugins_fault(
    is_plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Confused:
        @hookimpl
        async def pre_request(self) -> Response:
            return PlainTextResponse("starlette's, not ours")

    class PlainlyConfused:
        @hookimpl
        def pre_request(self) -> Response:
            return PlainTextResponse("starlette's, not ours")

    async with routing({"confused": PlainlyConfused() if is_plain else Confused()}, Recording()) as running:
        answer = await running.client.get("/")
        assert answer.status_code == 500
        assert "'confused' failed in pre_request" in answer.json()["error"]["message"]
    assert "wanted a router_core.Reply or None" in caplog.text


async def test_a_choice_that_was_not_offered_is_the_plugins_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Confused:
        @hookimpl
        def select_worker(self) -> Worker:
            return Worker("http://127.0.0.1:1")

    async with routing({"confused": Confused()}, Recording()) as running:
        answer = await running.client.get("/")
        assert answer.status_code == 500
        assert "'confused' failed in select_worker" in answer.json()["error"]["message"]
    assert "not among the workers offered" in caplog.text


# routes


async def test_hook_routes() -> None:
    """A plugin's routes come before the proxy, and their errors have the router's shape."""

    class Serves:
        @hookimpl
        def routes(self, router: Router) -> Sequence[BaseRoute]:
            async def own(request: StarletteRequest) -> Response:
                return PlainTextResponse(f"{len(router.pool)} workers, {request.path_params['name']}")

            async def refuses(_: StarletteRequest) -> Response:
                raise BadRequest("not so")

            async def crashes(_: StarletteRequest) -> Response:
                raise ValueError(SECRET)

            return [
                Route("/own/{name}", own),
                Route("/refuses", refuses, methods=["POST"]),
                Route("/crashes", crashes),
            ]

    worker = Recording()
    async with routing({"serves": Serves()}, worker) as running:
        assert (await running.client.get("/own/page")).text == "1 workers, page"
        refused = await running.client.post("/refuses")
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "not so")
        assert (await running.client.get("/refuses")).status_code == 405
        crashed = await running.client.get("/crashes")
        assert (crashed.status_code, crashed.json()["error"]["code"]) == (500, "PLUGIN_FAILED")
        assert crashed.json()["error"]["message"].startswith("plugin 'serves' failed in routes (crashes); ")
        assert SECRET not in crashed.text
        assert worker.requests == []
        assert (await running.client.get("/own")).json() == {"worker": "worker"}  # this one is nobody's


async def test_two_plugins_cannot_claim_one_route() -> None:
    class Claims:
        @hookimpl
        def routes(self) -> Sequence[BaseRoute]:
            return [Route("/mine", _unused, methods=["GET"])]

    manager = new_plugin_manager()
    manager.register(Claims(), "one")
    manager.register(Claims(), "two")
    with pytest.raises(PluginError, match="plugin 'two' and plugin 'one' both claim the route GET /mine"):
        make_app(Router(Settings(), manager))


# asgi_middleware


async def test_hook_asgi_middleware() -> None:
    """Around everything, the first plugin's outermost; what it makes of a request is routed."""

    class Moves:
        def __init__(self, before: str, after: str) -> None:
            self.before, self.after = before, after

        @hookimpl
        def asgi_middleware(self, app: ASGIApp, router: Router) -> ASGIApp:
            assert len(router.pool) == 0

            async def moved(scope: Scope, receive: Receive, send: Send) -> None:
                if scope["type"] == "http" and scope["path"] == self.before:
                    scope = {**scope, "path": self.after, "raw_path": self.after.encode()}
                await app(scope, receive, send)

            return moved

    class Breaks:
        @hookimpl
        def asgi_middleware(self) -> None:
            raise ValueError(SECRET)

    plugins = {"outer": Moves("/there", "/here"), "inner": Moves("/here", "/health")}
    async with routing(plugins, Recording()) as running:
        assert (await running.client.get("/there")).json()["status"] == "ok"
        assert (await running.client.get("/elsewhere")).json() == {"worker": "worker"}
    assert refused(Breaks()).startswith("plugin 'odd' failed in asgi_middleware")


# lifespan and setup


async def test_hook_lifespan() -> None:
    """Entered in order before the first request, left in reverse after the last; tasks end before."""
    story: list[str] = []

    class Lives:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        @asynccontextmanager
        async def lifespan(self, router: Router) -> AsyncIterator[None]:
            story.append(f"{self.name} up")
            router.tasks.start_soon(self.work)
            yield
            story.append(f"{self.name} down")

        async def work(self) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                story.append(f"{self.name} work ended")

        @hookimpl
        async def pre_request(self) -> Reply:
            story.append("request")
            return Reply.from_json({})

    async with routing({"a": Lives("a"), "b": Lives("b")}) as running:
        await running.client.get("/")
    assert story[:3] == ["a up", "b up", "request"]
    assert sorted(story[3:5]) == ["a work ended", "b work ended"]
    assert story[5:] == ["b down", "a down"]


async def test_failing_lifespan_ends_the_start_and_names_the_plugin() -> None:
    story: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            story.append("its task ended")

    class Before:
        @hookimpl
        @asynccontextmanager
        async def lifespan(self, router: Router) -> AsyncIterator[None]:
            router.tasks.start_soon(work)
            await anyio.lowlevel.checkpoint()
            try:
                yield
            finally:
                story.append("the one before was left")

    class Torn:
        @hookimpl
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            int("no number")
            yield

    class NoContext:
        @hookimpl
        def lifespan(self) -> None: ...

    for torn, reason in ((Torn(), "ValueError: invalid literal"), (NoContext(), "TypeError: ")):
        manager = new_plugin_manager()
        manager.register(Before(), "before")
        manager.register(torn, "odd")
        router = Router(Settings(), manager)
        with pytest.raises(ExceptionGroup) as failure:
            async with router.running():
                raise AssertionError("it does not start")
        (error,) = failure.value.exceptions
        assert isinstance(error, PluginError)
        assert str(error).startswith(f"plugin 'odd' failed in lifespan: {reason}")
    assert story == ["its task ended", "the one before was left"] * 2


async def test_hook_setup() -> None:
    """In order, with components; what it raises ends the start."""
    setups: list[str] = []

    class Offers:
        @hookimpl
        def setup(self, router: Router) -> None:
            setups.append("offers")
            router.components.register("answer", 42)

    class Uses:
        @hookimpl
        def setup(self, router: Router) -> None:
            setups.append("uses")
            assert router.components.get("answer") == 42

    async with routing({"offers": Offers(), "uses": Uses()}) as running:
        assert "answer" in running.router.components
    assert setups == ["offers", "uses"]

    assert refused(Uses()).startswith("plugin 'odd': component 'answer' is missing (registered: none); ")


async def test_setup_and_routes_that_raise_end_the_start_in_the_plugins_name() -> None:
    class BadSetup:
        @hookimpl
        def setup(self) -> None:
            raise KeyError("x")

    class BadValue:
        @hookimpl
        def setup(self) -> None:
            raise SettingsError("--its-flag: wanted less")

    class BadRoutes:
        @hookimpl
        def routes(self) -> Sequence[BaseRoute]:
            raise OSError("no disk")

    assert refused(BadSetup()) == "plugin 'odd' failed in setup: KeyError: 'x'"
    assert refused(BadValue()) == "--its-flag: wanted less"
    assert refused(BadRoutes()) == "plugin 'odd' failed in routes: OSError: no disk"


# on_weight_update


class Told:
    def __init__(self) -> None:
        self.updates: list[WeightUpdate] = []

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        await anyio.sleep(0.01)
        self.updates.append(update)


async def test_hook_on_weight_update() -> None:
    """Once per version and in order, before the call that announced it is answered."""
    told = Told()
    async with routing({"told": told}, Recording()) as running:

        async def announce(version: str | int) -> None:
            answer = await running.client.post("/weight_version", json={"weight_version": version})
            assert answer.is_success
            assert str(version) in [update.version for update in told.updates]

        await announce("1")
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(announce, 2)
        await announce("2")
        async with anyio.create_task_group() as tasks:
            for version in range(3, 11):
                tasks.start_soon(announce, version)
        now = (await running.client.get("/weight_version")).json()

    versions = [update.version for update in told.updates]
    assert versions[:2] == ["1", "2"]
    assert sorted(versions, key=int) == [str(version) for version in range(1, 11)]
    assert [update.previous for update in told.updates] == [None, *versions[:-1]]
    assert {update.source for update in told.updates} == {"announced"}
    assert now["weight_version"] == versions[-1]
    assert set(now["workers"].values()) == {versions[-1]}


async def test_an_error_in_on_weight_update_comes_after_everybody_was_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    plugins = {
        "clumsy": Raises("on_weight_update", ValueError(SECRET)),
        "told": told,
        "clumsier": Raises("on_weight_update", KeyError("second")),
    }
    async with routing(plugins) as running:
        answer = await running.client.post("/weight_version", json={"weight_version": "7"})
        assert answer.status_code == 500
        assert "plugin 'clumsy' failed in on_weight_update" in answer.json()["error"]["message"]
        assert SECRET not in answer.text
        assert [update.version for update in told.updates] == ["7"]
        assert "plugin 'clumsier' failed in on_weight_update" in caplog.text
        assert (await running.client.get("/weight_version")).json()["weight_version"] == "7"


# worker_changed


async def test_hook_worker_changed() -> None:
    """Right after each change; an error is logged and changes nothing."""
    changes: list[tuple[WorkerChange, str]] = []

    class Sees:
        @hookimpl
        def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
            changes.append((change, worker.state))

    plugins = {"clumsy": Raises("worker_changed", ValueError("logged")), "sees": Sees()}
    async with routing(plugins, Recording()) as running:
        pool = running.router.pool
        (worker,) = pool
        quarantine(pool, worker, "dead")
        quarantine(pool, worker, "dead")  # no change, no call
        pool.hold(worker, JOINING, "it has not answered yet", "joining")
        pool.release(worker, "health")
        ready(pool, worker)
        drain(pool, worker)
        await running.router.add_worker(worker.url)
        await running.client.post("/remove_worker", params={"url": worker.url})
    assert changes == [
        ("added", "joining"),
        ("quarantined", "quarantined"),
        ("readmitted", "ready"),
        ("draining", "draining"),
        ("added", "joining"),
        ("removed", "ready"),
    ]


# weights_confirmed


async def test_hook_weights_confirmed() -> None:
    """Each plugin releases its own hold; an error is logged and changes nothing."""

    class ReleasesItsHold:
        def __init__(self, owner: str) -> None:
            self.owner = owner

        @hookimpl
        def setup(self, router: Router) -> None:
            self.pool = router.pool

        @hookimpl
        def weights_confirmed(self, worker: Worker) -> None:
            self.pool.release(worker, self.owner)

    clumsy = Raises("weights_confirmed", ValueError("logged"))
    async with routing(
        {"one": ReleasesItsHold("one"), "clumsy": clumsy, "two": ReleasesItsHold("two")}, Recording()
    ) as running:
        pool = running.router.pool
        (worker,) = pool
        for owner in ("one", "two", "three"):
            pool.hold(worker, owner, "it has old weights", "stale")
        running.router.hooks.weights_confirmed(worker)
        assert list(worker.holds) == ["three"]


# router.generate()


async def test_a_plugins_own_generation_goes_through_the_other_plugins() -> None:
    worker, passed = Recording(), list[str]()

    class Asks:
        @hookimpl
        def routes(self, router: Router) -> Sequence[BaseRoute]:
            async def ask(_: StarletteRequest) -> Response:
                async with router.generate({"text": "Hi"}, session="s") as reply:
                    return Response(await reply.read(), reply.status)

            return [Route("/ask", ask, methods=["POST"])]

    plugins = {"asks": Asks(), "a": Onion("a", passed), "b": Onion("b", passed)}
    async with routing(plugins, worker) as running:
        answer = await running.client.post("/ask")
        assert answer.json() == {"worker": "worker"}
        assert [each.in_flight for each in running.router.pool] == [0]
        assert running.router.pool.of_session("s") is next(iter(running.router.pool))
    assert passed == ["a in", "b in", "b out", "a out"]
    ((path, headers, body),) = worker.requests
    assert (path, orjson.loads(body)) == ("/generate", {"text": "Hi"})
    assert headers["content-type"] == "application/json"


async def test_a_generation_that_is_not_read_gives_its_lease_and_connection_back() -> None:
    worker = Recording(pieces=[b"x" * 1000] * 10_000)
    worker.streaming = "/generate"
    async with routing({}, worker) as running:
        router = running.router
        async with router.generate({}) as reply:
            assert reply.body is None
            assert sum(worker.in_flight for worker in router.pool) == 1
        assert [worker.in_flight for worker in router.pool] == [0]
        assert router.proxy.busy_connections == 0


# implementations that could not be called


async def test_a_hook_that_does_not_fit_is_refused_with_what_is_wrong() -> None:
    class Sync:
        @hookimpl
        def on_weight_update(self) -> None: ...

    class Async:
        @hookimpl
        async def select_worker(self) -> None: ...

    class Generator:
        @hookimpl
        async def lifespan(self, router: Router) -> AsyncIterator[None]:
            yield

    class Wrapper:
        @hookimpl(wrapper=True)
        def pre_request(self) -> Any:
            return (yield)

    class Misspelt:
        @hookimpl
        async def pre_requests(self, exchange: Exchange) -> None: ...

    assert refused(Sync()) == "plugin 'odd': on_weight_update must be an async function"
    assert refused(Async()) == "plugin 'odd': select_worker must not be an async function"
    assert refused(Generator()) == (
        "plugin 'odd': lifespan must return an async context manager: put @asynccontextmanager below @hookimpl"
    )
    assert refused(Wrapper()).startswith("plugin 'odd': pre_request must not be a wrapper")
    assert refused(Misspelt()) == (
        f"plugin 'odd': no such hook: pre_requests (known: {', '.join(hook_names())})"
    )


async def test_hooks_that_nobody_implements_cost_nothing() -> None:
    hooks = Hooks(new_plugin_manager())
    assert hooks.pre_request == hooks.post_response == []
    assert hook_names() == [
        "add_options",
        "asgi_middleware",
        "attempt_failed",
        "client_gone",
        "lifespan",
        "on_weight_update",
        "post_response",
        "pre_request",
        "routes",
        "select_worker",
        "sender",
        "setup",
        "weights_confirmed",
        "worker_changed",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("value", [b"1\r\nx-evil: 2", b"1\nx-evil: 2", b"1\rx-evil: 2"])
async def test_a_header_that_a_plugin_made_cannot_become_two(value: bytes) -> None:
    class Careless:
        @hookimpl
        async def pre_request(self, exchange: Exchange) -> None:
            exchange.request.headers.append((b"x-mine", value))

    worker = Recording()
    async with routing({"careless": Careless()}, worker) as running:
        answer = await running.client.get("/")
        assert answer.status_code == 500
        assert "plugin 'careless' failed in pre_request" in answer.json()["error"]["message"]
        assert [worker.in_flight for worker in running.router.pool] == [0]
    assert worker.requests == []


@pytest.mark.anyio
async def test_a_reply_that_is_put_in_place_of_another_ends_the_other() -> None:
    class Replacing:
        @hookimpl
        async def post_response(self, exchange: Exchange) -> None:
            exchange.reply = Reply.from_json({"instead": True})

    async with routing({"replacing": Replacing()}, Recording()) as running:
        for _ in range(20):
            assert (await running.client.get("/stream")).json() == {"instead": True}
        await until(lambda: running.router.proxy.open_connections <= 1)


def test_a_route_that_another_one_would_answer_is_refused() -> None:
    class Offering:
        def __init__(self, path: str) -> None:
            self.path = path

        @hookimpl
        def routes(self) -> Sequence[BaseRoute]:
            return [Route(self.path, _unused, methods=["GET"])]

    manager = new_plugin_manager()
    manager.register(Offering("/turns/{number}"), "first")
    manager.register(Offering("/turns/mine"), "hidden")
    with pytest.raises(
        PluginError, match="plugin 'hidden' and plugin 'first' both claim the route GET /turns/mine"
    ):
        make_app(Router(Settings(), manager))
