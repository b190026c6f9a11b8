"""Hundreds of requests at once, half of them streams, a tenth of them hung up on half way."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from deadlines import until
from routers import Start
from slime_testing import Running

REQUESTS = 400
PROMPT = "<|im_start|>user\nNumber {}: tell me about trains, 電車 and 🚂.<|im_end|>\n<|im_start|>assistant\n"


LONG = {"max_new_tokens": 30_000, "ignore_eos": True}


class ManyClients:
    """The clients. ``answers`` has what each that stayed was told, by rid."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.answers: dict[str, dict[str, Any]] = {}
        self.left = 0

    async def ask(self, number: int) -> None:
        rid, streamed, leaves = f"r{number:04}", number % 2 == 0, number % 20 in (0, 5)
        body = {
            "text": PROMPT.format(number),
            "rid": rid,
            "stream": streamed,
            "sampling_params": {"max_new_tokens": 200 if leaves else 8, "ignore_eos": leaves},
        }
        headers = {"x-session-id": rid}
        if leaves and not streamed:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await self._session.post(
                        "/generate", json={**body, "sampling_params": LONG}, headers=headers
                    )
            self.left += 1
            return
        async with self._session.post("/generate", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            if not streamed:
                self.answers[rid] = await answer.json()
                return
            last: bytes | None = None
            events = 0
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last, events = line, events + 1
                if leaves and events == 3:
                    self.left += 1
                    return  # the connection is closed: there is more to come
            assert line == b"\n"
            assert last is not None
            self.answers[rid] = orjson.loads(last[6:])


def check(answers: dict[str, dict[str, Any]], journal: dict[str, dict[str, Any]]) -> None:
    for rid, answer in answers.items():
        entry = journal[rid]
        assert answer["output_ids"] == entry["output_ids"], rid
        assert answer["text"] == entry["text"], rid
        assert answer["meta_info"]["prompt_tokens"] == len(entry["input_ids"]), rid
        assert answer["meta_info"]["finish_reason"] == entry["finish_reason"], rid
        assert [row[0] for row in answer["meta_info"]["output_token_logprobs"]] == entry["output_logprobs"], (
            rid
        )


async def journals(running: Running) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for worker in running.router.pool:
        for entry in (await running.client.get(f"{worker.url}/journal")).json()["entries"]:
            entries[entry["rid"]] = entry
    return entries


@pytest.mark.anyio
async def test_hundreds_of_concurrent_requests_are_answered_and_leave_nothing(start: Start) -> None:
    before = asyncio.all_tasks()
    flags = ("--plugin", "engine", "--engine-workers", "2", "--plugin", "radix_cache")
    async with start(*flags) as running:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(running.url, connector=connector, timeout=timeout) as session:
            crowd = ManyClients(session)
            async with asyncio.TaskGroup() as tasks:
                for number in range(REQUESTS):
                    tasks.create_task(crowd.ask(number))
        assert crowd.left == REQUESTS // 10
        assert len(crowd.answers) == REQUESTS - crowd.left

        await until(lambda: all(worker.in_flight == 0 for worker in running.router.pool))
        await until(lambda: running.router.proxy.busy_connections == 0)
        journal = await journals(running)
        check(crowd.answers, journal)
        for worker in running.router.pool:
            loads = (await running.client.get(f"{worker.url}/v1/loads")).json()["loads"]
            assert [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads] == [0]
        for number in range(0, REQUESTS, 25):
            rid = f"r{number:04}"
            if rid not in crowd.answers:
                continue
            text = PROMPT.format(number) + crowd.answers[rid]["text"]
            found = (
                await running.client.post("/retrieve_from_text", json={"text": text, "session_id": rid})
            ).json()
            assert found["exact"], (rid, found["inexact_reason"])
            assert found["tokens"] == journal[rid]["input_ids"] + journal[rid]["output_ids"]
    assert asyncio.all_tasks() == before
