"""miles' session server before a router, or an engine: the samples that it makes are what the engine's journal says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from deadlines import HANG_S
from frameworks.session_server import Message, Refused, Sample, Session
from openai_.chat.chatting import Chat, chatting
from openai_.chat_models.families import QWEN3
from openai_.drift.rollouts import TOOLS
from slime_engine.moe import routed_experts

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: The server of the sessions.
BACKEND = pytest.mark.parametrize("through_router", [True, False], ids=["router", "engine"])
CALL = (
    "<think>\nA “plan” ☔.\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments":  {"place": "Zürich"}}\n</tool_call>'
)
SAID = ("<think>\nhm 日本\n</think>\n\nIt rains 😀.", "<think>\n\n</think>\n\nNo.", f"Well.\n{CALL}", CALL)


@asynccontextmanager
async def serving_sessions(
    start: Start, through_router: bool, *said: str | tuple[str, ...], tokens_per_second: float = 0
) -> AsyncIterator[tuple[Chat, httpx.AsyncClient]]:
    """The backend of a session server: a router with ``r3``, or its engine."""
    settings: dict[str, Any] = {"moe_layers": 2, "moe_topk": 2, "weight_version": "1"}
    settings["tokens_per_second"] = tokens_per_second
    async with chatting(start, *said, flags=("--plugin", "r3"), **settings) as chat:
        url = chat.running.url if through_router else chat.engine.url
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as backend:
            yield chat, backend


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def agent(session: Session, turns: int) -> None:
    """Ask, answer what is called, ask again."""
    new = [user(f"I am {session.name}. What now?")]
    for turn in range(turns):
        message = await session.ask(*new, temperature=1.0, max_tokens=400)
        calls = message.get("tool_calls") or []
        new = [{"role": "tool", "tool_call_id": call["id"], "content": f"{turn}°"} for call in calls]
        new = new or [user(f"And {turn}?")]


def assert_journaled(sample: Sample, chat: Chat) -> None:
    """``sample`` is an engine's context; the responses in it, and no other tokens, are trained on."""
    mask, logprobs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
    versions = []
    whole = False
    for entry in chat.entries:
        context = [*entry.input_ids, *entry.output_ids]
        if context == sample.tokens[: len(context)]:
            mask[len(entry.input_ids) : len(context)] = [1] * len(entry.output_ids)
            logprobs[len(entry.input_ids) : len(context)] = entry.output_logprobs
            versions.append(entry.spans()[-1][0])
            whole = whole or context == sample.tokens
    assert whole
    assert (sample.loss_mask, sample.logprobs) == (mask, logprobs)
    assert sample.versions == versions
    rows = routed_experts(sample.tokens, 0, chat.engine.host.settings)
    assert sample.experts.reshape(rows.shape).tolist() == rows.tolist()


async def assert_recorded(sample: Sample, name: str, chat: Chat) -> None:
    """The router has the same, and says that it is exact."""
    leaf = next(each for each in await chat.trajectories(name) if each["tokens"] == sample.tokens)
    assert leaf["exact"], leaf["inexact_reason"]
    assert (leaf["loss_mask"], leaf["rollout_logp"]) == (sample.loss_mask, sample.logprobs)


async def update_in_place(engine: httpx.AsyncClient, version: str) -> None:
    """Generations stop for it, and go on."""
    for path, body in (
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", {"model_path": "/w", "weight_version": version, "flush_cache": False}),
        ("/continue_generation", {}),
    ):
        (await engine.post(path, json=body)).raise_for_status()


@BACKEND
@pytest.mark.parametrize("added_rows", [False, True], ids=["all rows", "added rows"])
async def test_samples_of_parallel_sessions_are_what_the_engine_did(
    start: Start, through_router: bool, added_rows: bool
) -> None:
    pace = 400.0 if added_rows else 0.0
    async with serving_sessions(start, through_router, SAID, tokens_per_second=pace) as (chat, backend):
        sessions = [Session(backend, QWEN3, f"s{n}", added_rows, TOOLS) for n in range(4)]
        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(agent, session, 4)
            if added_rows:
                async with httpx.AsyncClient(base_url=chat.engine.url, trust_env=False) as engine:
                    for version in "234":
                        await anyio.sleep(0.1)
                        await update_in_place(engine, version)
        for session in sessions:
            sample = session.sample()
            assert sample.status == "completed"
            assert_journaled(sample, chat)
            if through_router:
                await assert_recorded(sample, session.name, chat)
        if added_rows:
            assert any(len(entry.spans()) > 1 for entry in chat.entries), "weights changed under way"
    starts = {turn.request.get("routed_experts_start_len") for session in sessions for turn in session.turns}
    assert (len(starts) > 4) == added_rows


async def test_an_answer_in_parts_is_read_by_the_router(start: Start) -> None:
    """Thoughts, content and calls; the session server sends the message back as it is."""
    async with serving_sessions(start, True, SAID[3], SAID[0]) as (chat, backend):
        session = Session(backend, QWEN3, "s", True, TOOLS)
        called = await session.ask(user("Hi"))
        assert (called["content"], called["reasoning_content"]) == ("", "A “plan” ☔.")
        [call] = called["tool_calls"]
        assert call["function"]["name"] == "weather"
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "wet"}
        said = await session.ask(answer)
        assert (said["content"], said["reasoning_content"]) == ("It rains 😀.", "hm 日本")
        assert_journaled(session.sample(), chat)
        cached = session.turns[-1].choice["meta_info"]
        assert {"cached_tokens", "prompt_tokens"} <= cached.keys()


async def test_a_turn_that_is_tried_again_is_a_branch(start: Start) -> None:
    async with serving_sessions(start, True, SAID[:2]) as (chat, backend):
        session = Session(backend, QWEN3, "s", True)
        await agent(session, 2)
        first = session.sample()
        session.take_back()
        await session.ask(user("Again."))
        again = session.sample()
        assert again.tokens != first.tokens
        for sample in (first, again):
            assert_journaled(sample, chat)
            await assert_recorded(sample, "s", chat)
        document = (await chat.running.client.get("/trajectories/s")).json()
        assert document["complete"]
        assert len(document["trajectories"]) == 2


@BACKEND
async def test_a_rollout_that_is_ended_by_aborts_ends_at_once(start: Start, through_router: bool) -> None:
    """miles aborts each engine itself until it is idle, and takes what came for an aborted sample, not a cut one."""
    async with serving_sessions(start, through_router, "w " * 2000, tokens_per_second=50) as (chat, backend):
        sessions = [Session(backend, QWEN3, f"s{n}") for n in range(4)]
        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(partial(session.ask, user(session.name), max_tokens=1000))
            with anyio.fail_after(HANG_S):
                while len(chat.entries) < 4 or not all(entry.output_ids for entry in chat.entries):  # noqa: ASYNC110  # the engine's own journal
                    await anyio.sleep(0.01)
            began = anyio.current_time()
            async with httpx.AsyncClient(base_url=chat.engine.url, trust_env=False) as engine:
                (await engine.post("/abort_request", json={"abort_all": True})).raise_for_status()
        assert anyio.current_time() - began < 2, "nobody tries again"
        assert len(chat.entries) == 4
        for session in sessions:
            assert session.sample().status == "aborted"
            assert_journaled(session.sample(), chat)


@BACKEND
async def test_refusal_by_the_backend_reaches_the_agent(start: Start, through_router: bool) -> None:
    async with serving_sessions(start, through_router, SAID) as (_, backend):
        session = Session(backend, QWEN3, "s")
        with pytest.raises(Refused, match="longer than the model's context length") as refused:
            await session.ask(user("x " * 40_000))
        assert refused.value.status == 400
        await session.ask(user("Hi"))
        assert session.sample().status == "completed"
        models = await backend.get("/v1/models", headers={"X-SMG-Routing-Key": "s"})
        assert models.json()["data"]
