"""Rollout code that talks to an engine through a router."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running


def bits(values: list[float]) -> bytes:
    """So that equality means bit for bit."""
    return array("d", values).tobytes()


class ScriptedEngine(FakeEngine):
    """A fake engine with the embedded engine's tokenizer."""

    tokenizer: EngineTokenizer
    eos: int

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        super().__init__(tokenizer, eos=tokenizer.encode("<|im_end|>")[0])


@dataclass
class Client:
    """A client that does what rollout code does."""

    running: Running
    engine: ScriptedEngine

    async def generate(self, text: str, ids: list[int], session: str = "", **body: Any) -> dict[str, Any]:
        """One turn in which the engine samples ``ids``."""
        self.engine.script.append(ids)
        headers = {"x-session-id": session} if session else {}
        answer = await self.running.client.post("/generate", json={"text": text, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def give(self, given: list[int], ids: list[int], session: str = "") -> dict[str, Any]:
        """One turn of which the prompt is given as ids."""
        self.engine.script.append(ids)
        body = {"input_ids": given, "session_id": session}
        answer = await self.running.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def records(self, session: str) -> list[dict[str, Any]]:
        """The leaves of a session."""
        answer = await self.running.client.get(f"/trajectories/{session}")
        assert answer.status_code == 200, answer.text
        leaves: list[dict[str, Any]] = answer.json()["trajectories"]
        return leaves

    async def retrieve(self, text: str, **body: Any) -> dict[str, Any]:
        answer = await self.running.client.post("/retrieve_from_text", json={"text": text, **body})
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = orjson.loads(answer.content)
        return document

    async def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = (await self.running.client.get("/cache_stats")).json()
        return document

    def last(self) -> tuple[list[int], list[int], bytes]:
        """Tokens, mask and logprobs of the journal's last entry."""
        consumed, (ids, logprobs) = self.engine.consumed[-1], self.engine.sampled[-1]
        return consumed + ids, [0] * len(consumed) + [1] * len(ids), bits([0.0] * len(consumed) + logprobs)


@asynccontextmanager
async def routed(start: Start, engine: ScriptedEngine, checkpoint: str, *flags: str) -> AsyncIterator[Client]:
    async with (
        serving(engine.app) as url,
        start(
            *(*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint),
            *("--worker-urls", url, *flags),
        ) as running,
    ):
        yield Client(running, engine)


def lifespan_free(app: Any) -> Any:
    """``app`` for HTTP only; the server's own start and end are answered here."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for kind in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{kind}"
            await send({"type": f"lifespan.{kind}.complete"})

    return wrapped
