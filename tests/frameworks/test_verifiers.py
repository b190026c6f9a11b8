"""verifiers: rollouts through its agent, interception server and client; each trace is a session of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("verifiers", minversion="0.4", reason="verifiers is not installed, or is an older one")

import verifiers.v1 as vf
from openai import AsyncOpenAI

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4


class Conversation(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # the package is not checked
    """A harness that runs its loop in this process: the model talks, its tools answer, until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig, options: dict[str, Any], streamed: bool) -> None:
        super().__init__(config)
        self._options, self._streamed = options, streamed

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            options = {"model": ctx.model, **self._options}
            await converse(client.chat.completions, messages, streamed=self._streamed, **options)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def roll_out(
    fleet: Fleet, streamed: bool, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> list[Any]:
    """The traces of some rollouts at once; ``meanwhile`` is called when all have begun.

    ``options``: what is asked of the model with each request.
    """
    endpoint = vf.EvalClientConfig(base_url=f"{fleet.url}/v1", api_key_var="NOT_SET")
    config = vf.AgentConfig(
        model="policy",
        harness=vf.harness_config_type("null")(id="null"),
        runtime=vf.SubprocessConfig(),
        client=endpoint,
    )
    agent = vf.Agent(config)
    agent.harness = Conversation(agent.config.harness, options, streamed)
    traces: list[Any] = []

    async def one(number: int) -> None:
        data = vf.TaskData(prompt=f"{number}. {QUESTION}", system_prompt=SYSTEM)
        traces.append(await agent.run(vf.Task(data)))

    async with agent, anyio.create_task_group() as rollouts:
        for number in range(ROLLOUTS):
            rollouts.start_soon(one, number)
        await fleet.generating(ROLLOUTS)
        await meanwhile()
    for trace in traces:
        assert trace.ok, trace.errors
    return traces


@STREAMED
async def test_rollouts_with_tools_while_weights_change(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        traces = await roll_out(fleet, streamed, lambda: fleet.update_weights("2"), tools=TOOLS)
        assert len(fleet.entries()) == 3 * ROLLOUTS
        for trace in traces:
            [record] = await fleet.trajectories(trace.id)
            assert {"1", "2"} <= set(record["generation_versions"])
            assert (trace.num_turns, trace.nodes[-1].message.content) == (3, LAST_WORDS)
            for result in RESULTS:
                assert result in record["text"]


@STREAMED
async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        traces = await roll_out(fleet, streamed, fleet.abort)
        for trace in traces:
            [record] = await fleet.trajectories(trace.id)
            assert record["finish_reason"]["type"] == "abort"
            assert trace.nodes[-1].message.content.startswith("It rains")
