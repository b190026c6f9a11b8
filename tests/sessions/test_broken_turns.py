"""Turns whose stream broke off: the three routes on a session agree, and no trainer takes such a turn for finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from deadlines import until
from openai_.chat.scripted import scripted
from openai_.dying import PATHS, asked_at, die_after, text_of_stream
from sessions.speaking import samples_of
from slime_radix_cache.samples import fill_sample

if TYPE_CHECKING:
    import httpx

    from routers import Start

pytestmark = pytest.mark.anyio

IDS = [300, 301, 302, 303, 304, 305]


async def records_of(client: httpx.AsyncClient, session: str) -> list[dict[str, Any]]:
    shown = (await client.get(f"/sessions/{session}")).json()
    assert shown["metadata"]["complete"]
    records: list[dict[str, Any]] = shown["records"]
    return records


async def leaves_of(client: httpx.AsyncClient, session: str) -> list[dict[str, Any]]:
    told = (await client.get(f"/trajectories/{session}")).json()
    assert told["complete"]
    leaves: list[dict[str, Any]] = told["trajectories"]
    return leaves


@pytest.mark.parametrize("path", PATHS)
async def test_turn_of_a_killed_worker_is_exact_and_aborted(start: Start, path: str) -> None:
    async with scripted(start, IDS) as (running, engine):
        client = running.client
        die_after(engine, 3)
        await text_of_stream(client, path, "a")
        (leaf,) = await leaves_of(client, "a")
        (record,) = await records_of(client, "a")
        found = await samples_of(client, "a")
    (sample,), (prompt,) = found.samples, engine.consumed
    assert sample.tokens == leaf["tokens"] == [*prompt, *IDS[:3]] == found.metadata["accumulated_token_ids"]
    assert sample.loss_mask == leaf["loss_mask"][sample.start :] == [1, 1, 1]
    assert sample.logprobs == leaf["rollout_logp"][sample.start :]
    assert (sample.about["status"], found.empty_reason) == ("aborted", None)
    assert (leaf["exact"], leaf["finish_reason"]) == (True, None)
    (choice,) = record["response"]["choices"]
    assert (record["exact"], record["status"], choice["finish_reason"]) == (True, "aborted", None)
    assert choice["meta_info"]["completion_tokens"] == 3
    filled = fill_sample(SimpleNamespace(Status={"ABORTED": "aborted"}), leaf)
    assert (filled.tokens, filled.status) == (sample.tokens, "aborted")


async def test_conversation_whose_last_turn_broke_off_is_aborted(start: Start) -> None:
    """Not completed, and not without that turn."""
    async with scripted(start) as (running, engine):
        client, path = running.client, "/v1/chat/completions"
        engine.eos = running.router.components.get("tokenizer").encode("<|im_end|>")[0]
        engine.script += [[*IDS, engine.eos], IDS]
        messages = [*PATHS[path]["messages"]]
        body = {"messages": messages, "session_id": "a"}
        said = (await client.post(path, json=body)).json()["choices"][0]["message"]
        die_after(engine, 2)
        await text_of_stream(
            client, path, "a", messages=[*messages, said, {"role": "user", "content": "And?"}]
        )
        (sample,) = (await samples_of(client, "a")).samples
        first, second = await records_of(client, "a")
    assert sample.tokens == [*engine.consumed[1], *IDS[:2]]
    assert sample.about["status"] == second["status"] == "aborted"
    assert first["status"] == "completed"
    assert sample.about["metadata"]["leaf"]["path_node_ids"] == [0, 1]


async def test_turn_that_broke_off_and_was_tried_again_is_no_sample(start: Start) -> None:
    async with scripted(start, IDS, IDS) as (running, engine):
        client, path = running.client, "/v1/chat/completions"
        whole = engine._stream
        die_after(engine, 3)
        await text_of_stream(client, path, "a")
        engine._stream, engine.events_sent = whole, 1 << 20  # type: ignore[method-assign]  # it is alive again
        assert (await client.post(path, json=asked_at(path, session_id="a"))).status_code == 200
        (sample,) = (await samples_of(client, "a")).samples
        assert sample.tokens == [*engine.consumed[1], *IDS]
        both = (await samples_of(client, "a", include_retries=True)).samples
    assert sorted(each.about["status"] for each in both) == ["aborted", "truncated"]


async def test_turn_that_still_runs_is_said_to_be_the_reason_for_no_sample(start: Start) -> None:
    async with scripted(start, IDS) as (running, engine):
        client = running.client
        engine.hold, engine.hold_after = anyio.Event(), 3
        headers = {"x-session-id": "a"}
        async with client.stream("POST", "/generate", json=asked_at("/generate"), headers=headers) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            assert len(await leaves_of(client, "a")) == 1  # which records what was streamed so far
            found = await samples_of(client, "a")
            (record,) = await records_of(client, "a")
            engine.hold.set()
            assert [piece async for piece in pieces]
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        (sample,) = (await samples_of(client, "a")).samples
    assert (found.samples, found.empty_reason) == ([], "still_running")
    assert record["status"] is None
    assert (sample.loss_mask, sample.about["status"]) == ([1] * len(IDS), "truncated")
