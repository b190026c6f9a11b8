"""A router with the OpenAI plugin before an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import orjson

from openai_.chat_models.families import QWEN3, Family
from openai_.chat_models.steered import Steered, by_text, speaking
from slime_engine.journal import Journal, JournalEntry

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

__all__ = ["Chat", "chatting"]


@dataclass
class Chat:
    """A client and the engine's journal. The engine says the next of ``script``, the last one for ever."""

    family: Family
    running: Running
    engine: Steered
    journal: Journal
    script: list[str | tuple[str, ...]]

    async def post(self, path: str = "/v1/chat/completions", **body: Any) -> Any:
        """The answer's JSON; it must be a 200."""
        answer = await self.running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error."""
        answer = await self.running.client.post(path, json=body)
        error: dict[str, Any] = answer.json()["error"]
        return answer.status_code, error

    async def streamed(self, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """The chunks of an answer."""
        async with self.running.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [orjson.loads(line) for line in lines[:-1]]

    async def replace_engine(self, url: str) -> None:
        """Let the worker at ``url`` answer from now on."""
        await self.running.client.post("/remove_worker", params={"url": self.engine.url})
        await self.running.client.post("/add_worker", params={"url": url})

    async def trajectories(self, session: str) -> list[dict[str, Any]]:
        """The records of a session."""
        document = (await self.running.client.get(f"/trajectories/{session}")).json()
        records: list[dict[str, Any]] = document["trajectories"]
        return records

    def read(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens spelt out."""
        return self.family.tokenizer.decode(ids)

    @property
    def entries(self) -> list[JournalEntry]:
        """The engine's journal entries, request by request; also when the engine has ended."""
        return list(self.journal.entries(None))

    @property
    def consumed(self) -> list[list[int]]:
        """The tokens that the engine consumed, request by request."""
        return [list(entry.input_ids) for entry in self.entries]

    @property
    def sampled(self) -> list[list[int]]:
        """The tokens that the engine sampled, request by request."""
        return [list(entry.output_ids) for entry in self.entries]


@asynccontextmanager
async def chatting(
    start: Start,
    *script: str | tuple[str, ...],
    family: Family = QWEN3,
    flags: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Chat]:
    """``script``: what the engine says to each new prompt, or draws from; ``settings`` are the engine's."""
    left = list(script)

    def reply(text: str) -> list[str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        return [answer] if isinstance(answer, str) else list(answer)

    async with (
        speaking(family, by_text(family.tokenizer, reply), seed=7, **settings) as engine,
        start(
            *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint),
            *("--plugin", "openai", "--worker-urls", engine.url, *flags),
        ) as running,
    ):
        while (await running.client.get("/readiness")).status_code != 200:  # noqa: ASYNC110  # a worker joins
            await anyio.sleep(0.01)
        yield Chat(family, running, engine, engine.host.engine.journal, left)
