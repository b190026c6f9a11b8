"""Agent-lightning's server, as it is since 1.0, before a router: its events are the engines' journals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("agentlightning.server.app", reason="agentlightning 1 is missing", exc_type=ImportError)

from agentlightning.client import AgentLightningAsyncClient
from agentlightning.server.app import create_app
from openai import AsyncOpenAI

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

ROLLOUTS = 4
KEY = "key"
CONFIG = {
    "key": KEY,
    "default_proxy": {"model_name": "policy", "train": {"temperature": 1.0}, "val": {"temperature": 0.0}},
}


async def agent(url: str, rollout: str, **options: Any) -> None:
    """A conversation below the URL of a rollout; the server hands the fields of bodies on, but no headers."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": f"{rollout}. {QUESTION}"})
    base_url = f"{url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1"
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        asked = {"model": "any", "extra_body": {"session_id": rollout}, **options}
        await converse(client.chat.completions, messages, streamed=False, **asked)


async def events_of(
    fleet: Fleet, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> dict[str, list[Any]]:
    """Return the server's training data of some rollouts; ``meanwhile`` is called when all have begun."""
    async with (
        serving(create_app(CONFIG)) as url,
        AgentLightningAsyncClient(key=KEY, base_url=url) as client,
    ):
        known = [{"model": "policy", "endpoint": f"{fleet.url}/v1"}]
        (await client.delete("/api/models")).raise_for_status()
        (await client.post("/api/models", json=known)).raise_for_status()
        wanted = [{"input": {"number": number}, "is_train": True} for number in range(ROLLOUTS)]
        enqueued = (await client.post("/api/rollouts", json=wanted)).raise_for_status().json()
        names = [rollout["rollout_id"] for rollout in enqueued]
        async with anyio.create_task_group() as rollouts:
            for rollout in names:
                rollouts.start_soon(partial(agent, url, rollout, **options))
            await fleet.generating(ROLLOUTS)
            await meanwhile()
        events: dict[str, list[Any]] = {}
        for rollout in names:
            answer = await client.get(f"/api/rollouts/{rollout}/events", params={"format": "triplet"})
            events[rollout] = [event["data"] for event in answer.raise_for_status().json()]
        return events


def assert_told(fleet: Fleet, events: list[Any]) -> None:
    """Each event is one entry of a journal."""
    keys = ("prompt_token_ids", "response_token_ids", "response_log_probs")
    entries = [
        [list(entry.input_ids), list(entry.output_ids), list(entry.output_logprobs)]
        for entry in fleet.entries()
    ]
    for event in events:
        assert [event[key] for key in keys] in entries


async def test_agents_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        told = await events_of(fleet, lambda: fleet.update_weights("2"), tools=TOOLS)
        assert len(fleet.entries()) == 3 * ROLLOUTS
        for rollout, events in told.items():
            assert len(events) == 3
            assert_told(fleet, events)
            [record] = await fleet.trajectories(rollout)
            assert {"1", "2"} <= set(record["generation_versions"])
            assert LAST_WORDS in record["text"]
            for result in RESULTS:
                assert result in record["text"]


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for rollout, events in (await events_of(fleet, fleet.abort)).items():
            assert len(events) == 1
            assert_told(fleet, events)
            [record] = await fleet.trajectories(rollout)
            assert record["finish_reason"]["type"] == "abort"
