"""Clients that send the conversations of a simulated workload to a real router or engine, as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
import httpx
import orjson

from benchmarks.simulated.workloads import Workload

__all__ = ["IDS", "IdClients"]

#: Ids of the embedded engine's vocabulary that are ordinary tokens.
IDS = range(300, 1200)


class IdClients:
    """The clients of one workload, which send token ids to ``url``."""

    def __init__(self, url: str, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._conversations = iter(workload.make(random.Random(seed)))
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=300)
        self._parts: dict[int, list[int]] = {}
        self.ttft_s: list[float] = []
        self.cached = self.tokens = 0

    async def run(self) -> float:
        """Hold all conversations. Returns the time that they took, in seconds."""
        begun = anyio.current_time()
        async with self._client, anyio.create_task_group() as tasks:
            for _ in range(self._workload.concurrent):
                tasks.start_soon(self._hold_conversations)
        return anyio.current_time() - begun

    async def _hold_conversations(self) -> None:
        for turns in self._conversations:
            ids: list[int] = []
            for turn in turns:
                await anyio.sleep(turn.think_s)
                ids = self._ids(turn.prompt.parts) if turn.prompt else [*ids, *_random_ids(turn.added)]
                ids = [*ids, *await self._generate(ids, turn.new_tokens)]

    def _ids(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return [one for number, tokens in parts for one in self._part(number, tokens)]

    def _part(self, number: int, tokens: int) -> list[int]:
        if number not in self._parts:
            self._parts[number] = _random_ids(tokens)
        return self._parts[number]

    async def _generate(self, ids: list[int], new_tokens: int) -> list[int]:
        params = {"max_new_tokens": new_tokens, "ignore_eos": True}
        body = orjson.dumps({"input_ids": ids, "sampling_params": params, "stream": True})
        sent, first, last = anyio.current_time(), 0.0, b""
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/generate", content=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or anyio.current_time()
                    last = line.encode()
        told = orjson.loads(last.removeprefix(b"data: "))
        self.ttft_s.append(first - sent)
        self.cached += told["meta_info"]["cached_tokens"]
        self.tokens += len(ids)
        output: list[int] = told["output_ids"]
        return output


def _random_ids(count: int) -> list[int]:
    return random.choices(IDS, k=count)
