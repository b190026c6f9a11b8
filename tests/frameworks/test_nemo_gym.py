"""NeMo Gym's model server before a router: its chats name sessions in the body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("nemo_gym", reason="nemo-gym is not installed")

from nemo_gym import server_utils
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf
from openai import AsyncOpenAI
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SESSIONS = [f"rollout-{number}" for number in range(4)]
UNUSED = {"host": "127.0.0.1", "port": 1}


@asynccontextmanager
async def model_server(fleet: Fleet) -> AsyncIterator[str]:
    """The URL of its model server, whose one model is the router."""
    config = VLLMModelConfig(
        **UNUSED,
        entrypoint="app.py",
        name="policy_model",
        base_url=f"{fleet.url}/v1",
        api_key="none",
        model="policy",
        return_token_id_information=False,  # that is vLLM's /tokenize
        uses_reasoning_parser=True,
    )
    head = server_utils.ServerClient(
        head_server_config=BaseServerConfig(**UNUSED), global_config_dict=OmegaConf.create({})
    )
    client = server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    try:
        async with serving(VLLMModel(config=config, server_client=head).setup_webserver()) as url:
            yield f"{url}/v1"
    finally:
        await client.close()
        server_utils._GLOBAL_AIOHTTP_CLIENT = None


async def roll_out(
    fleet: Fleet, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> dict[str, list[Any]]:
    """The messages of some conversations by session; ``meanwhile`` is called when all have begun."""
    conversations: dict[str, list[Any]] = {}

    async def one(url: str, session: str) -> None:
        messages = conversations.setdefault(session, [{"role": "system", "content": SYSTEM}])
        messages.append({"role": "user", "content": f"{session}. {QUESTION}"})
        named = {"extra_body": json.dumps({"session_id": session})}
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = {"model": "any", "metadata": named, **options}
            await converse(client.chat.completions, messages, streamed=False, **asked)

    async with model_server(fleet) as url, anyio.create_task_group() as rollouts:
        for session in SESSIONS:
            rollouts.start_soon(one, url, session)
        await fleet.generating(len(SESSIONS))
        await meanwhile()
    return conversations


async def test_agents_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        told = await roll_out(fleet, lambda: fleet.update_weights("2"), tools=TOOLS)
        for session, messages in told.items():
            assert messages[-1]["content"].endswith(LAST_WORDS)
            [record] = await fleet.trajectories(session)
            assert {"1", "2"} <= set(record["generation_versions"])
            for result in RESULTS:
                assert result in record["text"]
        assert len(fleet.entries()) == 3 * len(SESSIONS)


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for session, messages in (await roll_out(fleet, fleet.abort)).items():
            assert "It rains" in messages[-1]["content"]
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
