"""rllm-model-gateway itself before a router: its traces are what the engines' journals say.

``test_rllm.py`` has its later versions' requests, in our words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("rllm_model_gateway", reason="rllm-model-gateway is not installed")
pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

from openai import AsyncOpenAI
from rllm_model_gateway.client import AsyncGatewayClient
from rllm_model_gateway.models import GatewayConfig
from rllm_model_gateway.server import create_app

from clients.rolling import ANSWERS, QUESTION, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4


@asynccontextmanager
async def gateway_before(fleet: Fleet) -> AsyncIterator[Any]:
    """The client of a gateway whose one worker is the router."""
    app = create_app(GatewayConfig(store_worker="memory"))
    async with serving(app) as url:
        client = AsyncGatewayClient(url)
        await client.add_worker(fleet.url)
        yield client
        await client.close()


async def agent(url: str, session: str, streamed: bool, **options: Any) -> None:
    """A conversation; the agent names its session, which the gateway hands on."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": f"{session}. {QUESTION}"})
    headers = {"X-Session-Id": session}
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, default_headers=headers) as client:
        await converse(client.chat.completions, messages, streamed=streamed, model="policy", **options)


async def traces_of(
    fleet: Fleet, streamed: bool, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> dict[str, list[Any]]:
    """The gateway's traces by session; ``meanwhile`` is called when all sessions have begun."""
    async with gateway_before(fleet) as gateway:
        sessions = [await gateway.create_session() for _ in range(ROLLOUTS)]
        async with anyio.create_task_group() as rollouts:
            for each in sessions:
                url = gateway.get_session_url(each)
                rollouts.start_soon(partial(agent, url, each, streamed, **options))
            await fleet.generating(ROLLOUTS)
            await meanwhile()
        await gateway.flush()
        return {each: await gateway.get_session_traces(each) for each in sessions}


def assert_told(fleet: Fleet, traces: list[Any]) -> None:
    """Each trace is one entry of a journal."""
    entries = [
        (list(entry.input_ids), list(entry.output_ids), list(entry.output_logprobs))
        for entry in fleet.entries()
    ]
    for trace in traces:
        assert (trace.prompt_token_ids, trace.completion_token_ids, trace.logprobs) in entries


@STREAMED
async def test_traces_of_rollouts_while_weights_change(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        traces = await traces_of(fleet, streamed, lambda: fleet.update_weights("2"), tools=TOOLS)
        for session, told in traces.items():
            assert [trace.finish_reason for trace in told] == ["tool_calls", "tool_calls", "stop"]
            assert_told(fleet, told)
            [record] = await fleet.trajectories(session)
            last = told[-1]
            assert record["tokens"] == last.prompt_token_ids + last.completion_token_ids
            assert {"1", "2"} <= set(record["generation_versions"])


@STREAMED
async def test_the_trace_of_an_aborted_turn(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for session, told in (await traces_of(fleet, streamed, fleet.abort)).items():
            assert [trace.finish_reason for trace in told] == ["length"]
            assert_told(fleet, told)
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
