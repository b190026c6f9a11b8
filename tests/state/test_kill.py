"""SIGKILL to the router, again and again, while it is in use: what clients were told is true afterwards."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from anyio.abc import TaskGroup

from chaos.processes import Program
from deadlines import HANG_S
from ports import free_port
from slime_demo.conversations import FOLLOW_UPS, PROMPTS, Conversation
from slime_demo.verdict import expected
from slime_engine.model import load_model
from state.hearing import HeardAnswers
from state.killed import listening, started

#: The least. More take place until there was something of every kind to be lost.
KILLS = int(os.environ.get("SLIME_ROUTER_KILLS", "2"))
MOST_KILLS = KILLS + 15
CLIENTS = 6
TURNS = 3
#: That clients hear between two kills, or half of it.
ANSWERS = 3 * CLIENTS


@dataclass
class ToldFacts:
    """The facts that clients were told. A worker in registration or removal right now may be there or not."""

    conversations: list[Conversation] = field(default_factory=list)
    answers: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    version: int = 0
    workers: dict[str, str] = field(default_factory=dict)
    in_doubt: str | None = None

    def copy(self) -> ToldFacts:
        """Return a copy of the facts told until now."""
        return replace(self, answers=dict(self.answers), workers=dict(self.workers))

    def is_enough(self) -> bool:
        """True when there was something of every kind to be lost."""
        turns = [len(rids) for _, rids in self.answers.values()]
        return self.version > 2 and sum(turns) > 2 * CLIENTS and TURNS in turns


class RetryingClients:
    """The clients of the router. All of them ask again until they are answered."""

    def __init__(self, client: httpx.AsyncClient, told: ToldFacts) -> None:
        self._client = client
        self._told = told
        self._rids = 0
        self.steady = anyio.Event()  # set while the state is not looked at
        self.heard = HeardAnswers()

    def start(self, tasks: TaskGroup) -> None:
        for number in range(CLIENTS):
            tasks.start_soon(self.converse, number)
        tasks.start_soon(self.train)
        tasks.start_soon(self.register)

    async def _asked(self, path: str, body: Any) -> httpx.Response:
        while True:
            await self.steady.wait()
            with suppress(httpx.TransportError):
                answer = await self._client.post(path, json=body)
                if answer.status_code < 300 or answer.status_code == 404:
                    return answer
            await anyio.sleep(0.05)

    async def converse(self, number: int) -> None:
        while True:
            name = f"client{number}-{len(self._told.conversations)}"
            text = f"<|im_start|>user\n{PROMPTS[number % len(PROMPTS)]}<|im_end|>\n<|im_start|>assistant\n"
            one = Conversation(name, text, streamed=number % 2 == 1)
            self._told.conversations.append(one)
            for turn in range(TURNS):
                if turn:
                    one.add_message(FOLLOW_UPS[turn % len(FOLLOW_UPS)])
                answer = None
                while answer is None:
                    self._rids += 1
                    rid = f"{name}.{self._rids}"
                    with suppress(httpx.TransportError):
                        answer = await self._turn(one, rid)
                    if answer is None:
                        await anyio.sleep(0.05)
                one.rids.append(rid)
                one.add_answer(answer)
                self._told.answers[name] = one.text, list(one.rids)
                self.heard.add()
                if answer.endswith("\ufffd"):
                    break  # half a character: what follows it would not follow its tokens

    async def _turn(self, one: Conversation, rid: str) -> str | None:
        """Return the engine's text, when all of it has come."""
        body = {
            "text": one.text,
            "rid": rid,
            "stream": one.streamed,
            "sampling_params": {"max_new_tokens": 24},
        }
        headers = {"x-session-id": one.session}
        if not one.streamed:
            answer = await self._client.post("/generate", json=body, headers=headers)
            return str(answer.json()["text"]) if answer.status_code == 200 else None
        async with self._client.stream("POST", "/generate", json=body, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    event = orjson.loads(line[6:])
                    if event.get("meta_info", {}).get("finish_reason") is not None:
                        return str(event["text"])
        return None

    async def train(self) -> None:
        while True:
            version = self._told.version + 1
            body = {"model_path": "m", "weight_version": str(version)}
            await self._asked("/update_weights_from_disk", body)
            self._told.version = version
            await anyio.sleep(0.4)

    async def register(self) -> None:
        """Workers come and go; nobody listens there. The one under way is in doubt."""
        told = self._told
        while True:
            if len(told.workers) < 4:
                told.in_doubt = url = f"http://127.0.0.1:{random.randint(81, 900)}"
                answer = await self._asked("/workers", {"url": url, "worker_type": "decode"})
                told.workers[url] = answer.json()["worker_id"]
            else:
                told.in_doubt = url = random.choice(list(told.workers))
                await self._asked("/remove_worker", {"url": url})  # 404: it was, and nobody said so
                del told.workers[url]
            told.in_doubt = None
            await anyio.sleep(0.05)


async def check_state(client: httpx.AsyncClient, told: ToldFacts, engine: str) -> None:
    """Hold workers and weights against what was told."""
    shown = {worker["url"]: worker["id"] for worker in (await client.get("/workers")).json()["workers"]}
    there = {url: name for url, name in shown.items() if name != engine and url != told.in_doubt}
    assert engine in shown.values()
    assert there == {url: name for url, name in told.workers.items() if url != told.in_doubt}
    version = (await client.get("/weight_version")).json()["weight_version"]
    assert version in (str(told.version or "default"), str(told.version + 1)), "the next may be under way"


async def check_answers(client: httpx.AsyncClient, journal: dict[str, Any], told: ToldFacts) -> None:
    """Hold all answers that were told against the engine's journal."""
    decode = partial(load_model().tokenizer.decode, skip_special_tokens=True)
    for session, (text, rids) in told.answers.items():
        asked = {"text": text, "session_id": session}
        said = (await client.post("/retrieve_from_text", json=asked)).json()
        assert said["exact"], (session, said["inexact_reason"])
        right = expected([journal[rid] for rid in rids], decode)
        assert {name: said[name] for name in right} == right, session


async def journal_of(engine: httpx.AsyncClient) -> dict[str, Any]:
    entries = (await engine.get("/journal")).json()["entries"]
    return {entry["rid"]: entry for entry in entries}


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_is_lost_that_a_client_was_told_was_done(tmp_path: Path) -> None:
    port, engine_port, told = free_port(), free_port(), ToldFacts()
    engine_flags = ["engine", "--port", str(engine_port), "--tokens-per-second", "100"]
    router_flags = [
        *("--port", str(port), "--log-level", "warn"),
        *("--plugin", "radix_cache", "--middleware-paths", "quick_tokenizer", "--gc-threshold-k", "0"),
        *("--trajectory-log", str(tmp_path / "trajectories")),
        *("--plugin", "state", "--state-dir", str(tmp_path / "state")),
    ]
    engine_url = f"http://127.0.0.1:{engine_port}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False, limits=limits
        ) as client,
        httpx.AsyncClient(base_url=engine_url, timeout=HANG_S, trust_env=False) as engine,
    ):
        with started(Program(engine_flags, tmp_path / "engine.log")) as program:
            await listening(engine, program)
            fleet = RetryingClients(client, told)
            async with anyio.create_task_group() as tasks:
                worker = ""
                for kill in count():
                    before = told.copy()
                    with started(Program(router_flags, tmp_path / "router.log")) as router:
                        await listening(client, router)
                        if not kill:
                            answer = await client.post("/workers", json={"url": engine_url})
                            worker = answer.json()["worker_id"]
                            fleet.start(tasks)
                        await check_state(client, before, worker)
                        fleet.steady.set()
                        await check_answers(client, await journal_of(engine), before)
                        if kill >= KILLS and before.is_enough():
                            break
                        assert kill < MOST_KILLS, "too little was told that could be lost"
                        await fleet.heard.more(random.randint(ANSWERS // 2, ANSWERS))
                        await anyio.sleep(random.uniform(0, 0.1))  # while others are being answered
                        fleet.steady = anyio.Event()
                        router.kill()  # SIGKILL
                tasks.cancel_scope.cancel()
