"""OpenEnv's harness and client: the key of each client, which is all that can be set, names a session of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import pytest
from anyio import to_thread

pytest.importorskip("openenv", reason="openenv-core is not installed")

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import MCPHarnessAdapter, ResourceSession, ToolResult, VerifyResult
from openenv.core.harness.collect import build_model_step
from openenv.core.llm_client import OpenAIClient

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS, clock, weather
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SESSIONS = [f"rollout-{number}" for number in range(4)]
FLAG = "--session-from-api-key"


class Conversation(ResourceSession):  # type: ignore[misc]  # the package is not checked
    """An environment of two tools, in this process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def initial_messages(self) -> list[Any]:
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{self._name}. {QUESTION}"},
        ]

    def list_tools(self) -> list[Any]:
        functions = [each["function"] for each in TOOLS]
        return [
            Tool(name=each["name"], description=each["description"], input_schema=each["parameters"])
            for each in functions
        ]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        tools: dict[str, Callable[..., str]] = {"weather": weather, "clock": clock}
        return ToolResult(data=tools[name](**arguments))

    def verify(self, transcript: list[Any], final_state: Any | None = None) -> Any:
        return VerifyResult()

    def close(self) -> None:
        pass


def roll_out(fleet: Fleet, session: str) -> Any:
    """Its result, in a thread."""
    router = urlsplit(fleet.url)
    client = OpenAIClient(
        f"http://{router.hostname}", router.port, model="policy", api_key=session, max_tokens=600
    )
    return MCPHarnessAdapter().run_white_box(build_model_step(client), Conversation(session))


async def roll_out_all(fleet: Fleet, meanwhile: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Results of some rollouts by session; ``meanwhile`` is called when all have begun."""
    results: dict[str, Any] = {}

    async def one(session: str) -> None:
        results[session] = await to_thread.run_sync(roll_out, fleet, session)

    async with anyio.create_task_group() as rollouts:
        for session in SESSIONS:
            rollouts.start_soon(one, session)
        await fleet.generating(len(SESSIONS))
        await meanwhile()
    return results


async def test_rollouts_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, flags=(FLAG,), tokens_per_second=300) as fleet:
        for session, result in (await roll_out_all(fleet, lambda: fleet.update_weights("2"))).items():
            assert (result.done, result.metrics["turns"]) == (True, 3)
            assert result.messages[-1]["content"].strip() == LAST_WORDS
            # It keeps connections of an event loop that is gone, so OpenAI's SDK may ask for a turn twice.
            records = [each for each in await fleet.trajectories(session) if LAST_WORDS in each["text"]]
            assert records
            for record in records:
                assert {"1", "2"} <= set(record["generation_versions"])
                for wanted in RESULTS:
                    assert wanted in record["text"]


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, flags=(FLAG,), tokens_per_second=100) as fleet:
        for session, result in (await roll_out_all(fleet, fleet.abort)).items():
            assert result.messages[-1]["content"].startswith("It rains")
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
