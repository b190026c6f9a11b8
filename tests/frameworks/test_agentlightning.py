"""Agent-lightning's proxy, LiteLLM's until 1.0, before a router: the tokens of its spans are the engines' journals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from deadlines import HANG_S

pytest.importorskip("agentlightning.llm_proxy", reason="agentlightning 0.3 is not installed")

from agentlightning import InMemoryLightningStore, LlmProxyTraceToTriplet
from agentlightning.llm_proxy import LLMProxy
from openai import AsyncOpenAI

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4


@asynccontextmanager
async def proxy_before(fleet: Fleet) -> AsyncIterator[Any]:
    """Its proxy in a thread, with streams as they are and the headers of agents handed on; neither is the default."""
    model = {"model": "hosted_vllm/policy", "api_base": f"{fleet.url}/v1", "api_key": "none"}
    proxy: Any = LLMProxy(
        model_list=[{"model_name": "policy", "litellm_params": model}],
        store=InMemoryLightningStore(thread_safe=True),
        host="127.0.0.1",
        launch_mode="thread",
        litellm_config={"general_settings": {"forward_client_headers_to_llm_api": True}},
        middlewares=["rollout_attempt"],
        callbacks=["return_token_ids", "logprobs", "opentelemetry"],
    )
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


async def triplets_of(proxy: Any, rollout: str, turns: int) -> list[Any]:
    """Its samples, turn by turn, when all have come."""
    with anyio.fail_after(HANG_S):
        while True:
            triplets: list[Any] = LlmProxyTraceToTriplet().adapt(await proxy.store.query_spans(rollout))
            if len(triplets) == turns:
                return triplets
            await anyio.sleep(0.05)


async def roll_out(
    fleet: Fleet, streamed: bool, turns: int, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> dict[str, list[Any]]:
    """The messages of some conversations by rollout; ``meanwhile`` is called when all have begun."""
    conversations: dict[str, list[Any]] = {}

    async def one(proxy: Any, number: int) -> None:
        rollout = await proxy.store.start_rollout(input=number)
        name = rollout.rollout_id
        messages = conversations.setdefault(name, [{"role": "system", "content": SYSTEM}])
        messages.append({"role": "user", "content": f"{number}. {QUESTION}"})
        resource = proxy.as_resource(name, rollout.attempt.attempt_id)
        async with AsyncOpenAI(
            base_url=f"{resource.endpoint}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"X-Session-Id": name},
        ) as client:
            asked = {"model": resource.model, **options}
            await converse(client.chat.completions, messages, streamed=streamed, **asked)
        if not streamed:  # the spans of streams have no tokens
            assert_told(fleet, await triplets_of(proxy, name, turns))

    async with proxy_before(fleet) as proxy, anyio.create_task_group() as rollouts:
        for number in range(ROLLOUTS):
            rollouts.start_soon(one, proxy, number)
        await fleet.generating(ROLLOUTS)
        await meanwhile()
    assert len(conversations) == ROLLOUTS
    return conversations


def assert_told(fleet: Fleet, triplets: list[Any]) -> None:
    """Each triplet is one entry of a journal."""
    entries = [(list(entry.input_ids), list(entry.output_ids)) for entry in fleet.entries()]
    for triplet in triplets:
        assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) in entries


@STREAMED
async def test_agents_with_tools_while_weights_change(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        told = await roll_out(fleet, streamed, 3, lambda: fleet.update_weights("2"), tools=TOOLS)
        for rollout, messages in told.items():
            [record] = await fleet.trajectories(rollout)
            assert {"1", "2"} <= set(record["generation_versions"])
            assert messages[-1]["content"].strip() == LAST_WORDS
            for result in RESULTS:
                assert result in record["text"]


@STREAMED
async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for rollout, messages in (await roll_out(fleet, streamed, 1, fleet.abort)).items():
            [record] = await fleet.trajectories(rollout)
            assert record["finish_reason"]["type"] == "abort"
            assert messages[-1]["content"].startswith("It rains")
