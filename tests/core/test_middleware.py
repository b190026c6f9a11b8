"""ASGI middleware around the byte path: of slime's form, and of any other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from deadlines import HANG_S, until
from router_core.router import Router
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from routers import BARE, Start, answering
from slime_http.serving import serving
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio


class Accountant:
    """Keeps books of each reply, and takes its time for it when the client has everything."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        router.components.register("accountant", self)
        self.booked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await asyncio.sleep(0.05)
                self.booked += 1

        await self.app(scope, receive, watched if scope["type"] == "http" else send)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_work_behind_the_last_piece_is_not_cancelled(start: Start, framing: str) -> None:
    async def slow(wire: Wire) -> None:
        while await wire.request():
            await anyio.sleep(0.05)  # long enough for the router to watch the client
            if framing == "length":
                await wire.send(answer(b"hello"))
            else:
                await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
                await anyio.sleep(0.02)
                await wire.send(b"0\r\n\r\n")

    path = f"{__name__}.Accountant"
    async with (
        scripted(slow) as worker,
        start(*BARE, "--worker-urls", worker.url, "--middleware-paths", path) as running,
    ):
        accountant = running.router.components.get("accountant")
        for number in range(1, 4):
            assert (await running.client.get("/")).content == b"hello"
            with anyio.fail_after(HANG_S):
                while accountant.booked < number:  # noqa: ASYNC110  # it tells nobody
                    await anyio.sleep(0.005)


#: As those of slime's original router are written, with all that they found there.
SLIMES = """
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse

class Middleware(BaseHTTPMiddleware):
    def __init__(self, app, *, router):
        super().__init__(app)
        self.router = router
        self.args = router.args
        self.verbose = getattr(router, "verbose", False)
        self.workers = router.worker_urls
        self.router.radix_tree = {"of": "its own"}

    async def dispatch(self, request, call_next):
        if request.url.path != "/load":
            response = await call_next(request)
            response.headers["x-workers"] = str(len(self.workers))
            return response
        return JSONResponse({
            "port": self.args.port,
            "least": min(self.router.worker_request_counts, key=self.router.worker_request_counts.get),
            "workers": dict(self.workers),
            "tree": self.router.radix_tree,
        })
"""

#: As they are published for any ASGI application, and one that hands what it gets on to its base.
STANDARD = """
class Plain:
    def __init__(self, app, header=b"x-plain"):
        self.app, self.header = app, header

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (self.header, b"1")]
            await send(message)
        await self.app(scope, receive, stamped)

class OfSlimes(Plain):
    def __init__(self, app, *, router):
        super().__init__(app, header=b"x-" + router.args.log_level.encode())

class Derived(OfSlimes):
    def __init__(self, app, **more):
        super().__init__(app, **more)
"""


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two files, where Python finds them."""
    (tmp_path / "slimes_layers.py").write_text(SLIMES)
    (tmp_path / "standard_layers.py").write_text(STANDARD)
    monkeypatch.syspath_prepend(tmp_path)


async def test_slimes_middleware_finds_what_slimes_router_offers(start: Start, layers: None) -> None:
    """In flight at each worker, as it is at that moment, also where the mapping was fetched at the start."""
    engine = FakeEngine()
    engine.script.append((200, b"held"))
    engine.delay = leave = anyio.Event()
    path = "slimes_layers.Middleware"
    async with (
        serving(engine.app) as busy,
        serving(answering(b"free")) as idle,
        start(*BARE, "--slime-router-middleware-paths", path, "--port", "7") as running,
    ):
        client, urls = running.client, running.router.worker_urls

        async def load() -> dict[str, object]:
            found: dict[str, object] = (await client.get("/load")).json()
            return found

        await running.router.add_worker(busy)
        async with anyio.create_task_group() as tasks:
            answers: list[httpx.Response] = []

            async def generate() -> None:
                answers.append(await client.post("/generate", json={}))

            tasks.start_soon(generate)
            await until(lambda: bool(engine.asked))
            added = await client.post("/add_worker", params={"url": idle})
            assert added.json()["worker_urls"] == {busy: 1, idle: 0}
            assert await load() == {
                "port": 7,
                "least": idle,
                "workers": {busy: 1, idle: 0},
                "tree": {"of": "its own"},
            }
            leave.set()
        assert (answers[0].text, answers[0].headers["x-workers"]) == ("held", "2")
        assert (await load())["workers"] == {busy: 0, idle: 0}
        await client.post("/remove_worker", params={"url": busy})
        assert (await load())["workers"] == {idle: 0}

        assert busy not in urls
        assert repr(urls) == repr({idle: 0})
        with pytest.raises(KeyError):
            urls[busy]
        with pytest.raises(TypeError):
            urls[busy] = 1  # type: ignore[index]  # it is read-only


async def test_middleware_that_takes_no_router_works_too(start: Start, layers: None) -> None:
    text = b"the same again, and " * 200
    paths = ["standard_layers.Derived", "starlette.middleware.gzip.GZipMiddleware", "standard_layers.Plain"]
    async with (
        serving(answering(text)) as worker,
        start(*BARE, "--middleware-paths", *paths, "--worker-urls", worker) as running,
    ):
        got = await running.client.get("/anything", headers={"accept-encoding": "gzip"})
        assert got.content == text
        assert got.headers["content-encoding"] == "gzip"
        assert int(got.headers["content-length"]) < len(text)
        assert (got.headers["x-info"], got.headers["x-plain"]) == ("1", "1")
        whole = await running.client.get("/anything", headers={"accept-encoding": "identity"})
        assert whole.content == text
        assert int(whole.headers["content-length"]) == len(text)
