"""Chats and completions have their experts whichever plugin is loaded first."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from r3.replays import Replay, replaying, rows_in, stream_of
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

ORDERS = (("radix_cache", "openai", "r3"), ("radix_cache", "r3", "openai"), ("r3", "radix_cache", "openai"))
CHAT = "/v1/chat/completions"


async def chat(replay: Replay, messages: list[dict[str, Any]], **body: Any) -> Any:
    """The only choice of an answer; of a stream, the last one with experts."""
    body = {"messages": messages, "max_tokens": 12, "session_id": "s", "return_token_ids": True, **body}
    answer = await replay.running.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"][0]
    choices = [choice for event in stream_of(answer.content) for choice in event["choices"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    (last,) = [choice for choice in choices if "routed_experts" in choice]
    return {**last, "message": {"role": "assistant", "content": content}}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_of_a_chat_has_its_new_rows(
    start: Start, model: NgramModel, checkpoint: str, order: tuple[str, ...], stream: bool
) -> None:
    async with replaying(start, model, checkpoint, order=order) as replay:
        messages: list[dict[str, Any]] = []
        starts = []
        for question in ("Why?", "And then?", "Really?"):
            messages.append({"role": "user", "content": question})
            choice = await chat(replay, messages, stream=stream)
            messages.append(choice["message"])
            starts.append(choice.get("routed_experts_start_len", 0))
            leaf = (await replay.running.client.get("/trajectories/s?return_routed_experts=true")).json()
            record = leaf["trajectories"][-1]
            replay.check_experts(record)
            wanted = replay.rows(record["tokens"], starts[-1])
            assert rows_in(choice["routed_experts"]).tolist() == wanted.tolist()
            matrices = [np.frombuffer(b64decode(one), "<i4").tolist() for one in choice["routing_matrices"]]
            assert matrices == [row.ravel().tolist() for row in wanted[-len(matrices) :]]
        assert starts[0] == 0
        assert starts == sorted(set(starts))


@pytest.mark.parametrize("order", ORDERS)
async def test_a_chat_that_asks_gets_all_rows_and_one_that_declines_gets_none(
    start: Start, model: NgramModel, checkpoint: str, order: tuple[str, ...]
) -> None:
    async with replaying(start, model, checkpoint, order=order) as replay:
        messages = [{"role": "user", "content": "Why?"}]
        messages.append((await chat(replay, messages))["message"])
        messages.append({"role": "user", "content": "And then?"})
        choice = await chat(replay, messages, return_routed_experts=True)
        assert "routed_experts_start_len" not in choice
        leaf = (await replay.running.client.get("/trajectories/s")).json()["trajectories"][-1]
        assert rows_in(choice["routed_experts"]).tolist() == replay.rows(leaf["tokens"]).tolist()
        messages = [{"role": "user", "content": "Another one?"}]
        choice = await chat(replay, messages, return_routed_experts=False, session_id="t")
        assert "routed_experts" not in choice
        (leaf,) = (await replay.running.client.get("/trajectories/t?return_routed_experts=true")).json()[
            "trajectories"
        ]
        assert (leaf["experts_exact"], leaf["routed_experts_reason"]) == (False, "not_told")


@pytest.mark.parametrize("order", ORDERS)
async def test_only_what_clients_ask_for_is_recorded_when_asked(
    start: Start, model: NgramModel, checkpoint: str, order: tuple[str, ...]
) -> None:
    async with replaying(start, model, checkpoint, "--r3-inject", "when-asked", order=order) as replay:
        messages = [{"role": "user", "content": "Why?"}]
        assert "routed_experts" not in await chat(replay, messages)
        assert "routed_experts" in await chat(replay, messages, return_routed_experts=True, session_id="t")
        for session, is_exact in (("s", False), ("t", True)):
            path = f"/trajectories/{session}?return_routed_experts=true"
            (leaf,) = (await replay.running.client.get(path)).json()["trajectories"]
            assert leaf["experts_exact"] is is_exact
