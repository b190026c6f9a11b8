"""AReaL's data proxy before a router that it knows as an external model: agents stream and name sessions through it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

pytest.importorskip("areal", reason="areal is not installed")

from areal.experimental.inference_service.data_proxy.app import create_app
from areal.experimental.inference_service.data_proxy.config import DataProxyConfig
from openai import AsyncOpenAI

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4
ADMIN = "admin-key"


async def roll_out(
    fleet: Fleet, streamed: bool, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> dict[str, list[Any]]:
    """Messages of some conversations by session; ``meanwhile`` is called when all have begun."""
    conversations: dict[str, list[Any]] = {}

    async def one(url: str, name: str, key: str) -> None:
        messages = conversations.setdefault(name, [{"role": "system", "content": SYSTEM}])
        messages.append({"role": "user", "content": f"{name}. {QUESTION}"})
        headers = {"X-Session-Id": name}
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, default_headers=headers) as client:
            await converse(client.chat.completions, messages, streamed=streamed, model="external", **options)

    app: Any = create_app(DataProxyConfig(backend_addr="", admin_api_key=ADMIN))
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}) as admin,
    ):
        known = {"name": "external", "url": f"{fleet.url}/v1", "model": "policy"}
        (await admin.post("/register_model", json=known)).raise_for_status()
        begun = await admin.post("/rl/start_session", json={"task_id": "task", "group_size": ROLLOUTS})
        async with anyio.create_task_group() as rollouts:
            for each in begun.raise_for_status().json()["sessions"]:
                rollouts.start_soon(one, url, each["session_id"], each["session_api_key"])
            await fleet.generating(ROLLOUTS)
            await meanwhile()
    assert len(conversations) == ROLLOUTS
    return conversations


@STREAMED
async def test_agents_with_tools_while_weights_change(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        told = await roll_out(fleet, streamed, lambda: fleet.update_weights("2"), tools=TOOLS)
        assert len(fleet.entries()) == 3 * ROLLOUTS
        for session, messages in told.items():
            [record] = await fleet.trajectories(session)
            assert {"1", "2"} <= set(record["generation_versions"])
            assert messages[-1]["content"].strip() == LAST_WORDS
            for result in RESULTS:
                assert result in record["text"]


@STREAMED
async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for session, messages in (await roll_out(fleet, streamed, fleet.abort)).items():
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
            assert messages[-1]["content"].startswith("It rains")
