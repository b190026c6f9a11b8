"""An engine on a real socket, as tests talk to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import orjson

from deadlines import HANG_S
from slime_engine.app import make_backend_app
from slime_engine.backend import Backend
from slime_engine.engine import EngineHost
from slime_engine.model import NgramModel
from slime_engine.scheduler import Scheduler
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend
from slime_http.serving import serving

#: A prompt after which the model writes an answer and mostly ends it within a few dozen tokens.
CHAT = "<|im_start|>user\nTell me a short story.<|im_end|>\n<|im_start|>assistant\n"

JSONDict = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """An engine that serves: a client of it, and its inside."""

    client: httpx.AsyncClient
    host: EngineHost

    async def generate(self, expect: int = 200, /, **body: Any) -> Any:
        """The answer to ``/generate``, whose status must be ``expect``."""
        answer = await self.client.post("/generate", json=body)
        assert answer.status_code == expect, answer.text
        return answer.json()

    @asynccontextmanager
    async def asking(self, **body: Any) -> AsyncIterator[list[JSONDict]]:
        """Ask ``/generate`` while the block runs. The list has the answer after it."""
        answers: list[JSONDict] = []
        done = anyio.Event()

        async def ask() -> None:
            answers.append(await self.generate(**body))
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            yield answers
            with anyio.fail_after(HANG_S):
                await done.wait()

    async def stream(self, **body: Any) -> list[JSONDict]:
        """All events of a streamed ``/generate``; the last one must be ``[DONE]``."""
        return [event async for event in self.events("/generate", **body)]

    async def events(self, path: str, **body: Any) -> AsyncGenerator[JSONDict, None]:
        async with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            done = False
            async for line in answer.aiter_lines():
                if not line:
                    continue
                assert not done, "nothing comes after [DONE]"
                assert line.startswith("data: ")
                if line == "data: [DONE]":
                    done = True
                else:
                    yield orjson.loads(line.removeprefix("data: "))
            assert done

    async def post(self, path: str, expect: int = 200, /, **body: Any) -> httpx.Response:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == expect, answer.text
        return answer

    async def get(self, path: str, expect: int = 200, /, **query: str) -> Any:
        answer = await self.client.get(path, params=query)
        assert answer.status_code == expect, answer.text
        return answer.json()

    async def until(self, condition: Callable[[Scheduler], bool]) -> None:
        """Wait for a state of the scheduler."""
        with anyio.fail_after(HANG_S):
            while not condition(self.host.engine.scheduler):  # noqa: ASYNC110  # its state has no event
                await anyio.sleep(0.002)

    async def journal(self, rid: str | None = None) -> list[JSONDict]:
        entries: list[JSONDict] = (await self.get("/journal", **({"rid": rid} if rid else {})))["entries"]
        return entries


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def served(load: Callable[[], NgramModel], settings: Settings) -> AsyncIterator[Served]:
    async with served_backend(lambda: StatelessBackend(load(), settings), settings) as running:
        yield running


@asynccontextmanager
async def served_backend(load: Callable[[], Backend], settings: Settings) -> AsyncIterator[Served]:
    app = make_backend_app(settings, load)
    async with (
        serving(app, grace_s=1) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client,
    ):
        yield Served(client, app.state.host)
