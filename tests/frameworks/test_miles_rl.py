"""miles' agentic rollouts, from PyPI, before its own session server or the router's: its samples are the journals'."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import pytest

pytest.importorskip("miles", reason="miles-rl is not installed")

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.generate_hub.agentic_tool_call import generate
from miles.rollout.session.session_server import SessionServer
from miles.utils import http_utils
from miles.utils.misc import function_registry
from miles.utils.types import Sample as MilesSample
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, Sample, serving_fleet
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Its own session server cannot stream; the router's can.
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4
AGENT = "agent of the test"


async def agent(
    base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, *, streamed: bool
) -> dict[str, Any]:
    """Talk with tools until the model calls none; it names its session where its base URL does not."""
    messages: list[Any] = list(prompt)
    headers = None if streamed else {"X-Session-Id": metadata["name"]}
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, default_headers=headers
    ) as client:
        asked = {"model": "policy", "tools": TOOLS, **request_kwargs}
        await converse(client.chat.completions, messages, streamed=streamed, **asked)
    return {"last_words": messages[-1]["content"], "base_url": base_url}


@asynccontextmanager
async def session_server(args: Namespace, fleet: Fleet) -> AsyncIterator[str]:
    """The URL of miles' own, before the router."""
    server = SessionServer(args, fleet.url)
    async with serving(server.app) as url:
        yield url
        await server.client.aclose()


@asynccontextmanager
async def rollouts_of(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
    """miles' ``generate()`` before a session server; that of the router when ``streamed``."""
    args = Namespace(
        hf_checkpoint=fleet.checkpoint,
        tito_model="qwen3",
        tito_allowed_append_roles=["tool", "user"],
        custom_agent_function_path=AGENT,
        generate_multi_samples=False,
        use_rollout_routing_replay=False,
        use_distributed_post=False,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        sglang_server_concurrency=ROLLOUTS,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(fleet.checkpoint)

    async def roll_out(number: int) -> Any:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{number}. {QUESTION}"},
        ]
        asked = GenerateFnInput(
            state=Namespace(args=args, tokenizer=tokenizer),
            sample=MilesSample(prompt=messages, index=number, metadata={"name": f"sample-{number}"}),
            sampling_params={"temperature": 1.0, "max_new_tokens": 600},
            evaluation=False,
        )
        return (await generate(asked)).samples

    async with AsyncExitStack() as stack:
        url = fleet.url if streamed else await stack.enter_async_context(session_server(args, fleet))
        args.session_server_ip, args.session_server_port = urlsplit(url).hostname, urlsplit(url).port
        # one for each event loop
        monkeypatch.setattr(http_utils, "_http_client", None)
        http_utils.init_http_client(args)
        with function_registry.temporary(AGENT, partial(agent, streamed=streamed)):
            yield roll_out
        await http_utils._http_client.aclose()


async def roll_out_all(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, streamed: bool, meanwhile: Callable[[], Awaitable[None]]
) -> list[Any]:
    """Samples of some rollouts at once; ``meanwhile`` is called when all have begun."""
    samples: list[Any] = []
    async with rollouts_of(fleet, monkeypatch, streamed) as roll_out:

        async def one(number: int) -> None:
            samples.append(await roll_out(number))

        async with anyio.create_task_group() as rollouts:
            for number in range(ROLLOUTS):
                rollouts.start_soon(one, number)
            await fleet.generating(ROLLOUTS)
            await meanwhile()
    return samples


def sample_of(sample: Any) -> Sample:
    """miles masks responses only: from the first sampled token on."""
    before = len(sample.tokens) - sample.response_length
    mask = [0] * before + (sample.loss_mask or [1] * sample.response_length)
    return Sample(sample.tokens, mask, [0.0] * before + sample.rollout_log_probs)


async def assert_recorded(fleet: Fleet, sample: Any, streamed: bool) -> None:
    """The session that the agent named has the sample; miles has deleted the one that it got of the router."""
    if streamed:
        gone = await fleet.running.client.get(urlsplit(sample.metadata["base_url"]).path)
        assert gone.status_code == 404
        return
    [record] = await fleet.trajectories(sample.metadata["name"])
    assert (record["tokens"], record["loss_mask"]) == (sample.tokens, list(sample_of(sample).mask))


@STREAMED
async def test_agents_with_tools_while_weights_change(
    start: Start, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        samples = await roll_out_all(fleet, monkeypatch, streamed, lambda: fleet.update_weights("2"))
        assert len(fleet.entries()) == 3 * ROLLOUTS
        versions = [set(entry.as_json()["output_versions"]) for entry in fleet.entries()]
        assert {"1", "2"} in versions, "new weights in the middle of a turn"
        for sample in samples:
            assert sample.status is MilesSample.Status.COMPLETED
            assert sample.metadata["last_words"].strip() == LAST_WORDS
            assert (len(sample.weight_versions), sample.weight_versions[-1]) == (3, "2")
            fleet.check(sample_of(sample))
            await assert_recorded(fleet, sample, streamed)
            for result in RESULTS:
                assert result in sample.response


@STREAMED
async def test_an_aborted_turn_is_an_aborted_sample(
    start: Start, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for sample in await roll_out_all(fleet, monkeypatch, streamed, fleet.abort):
            assert sample.status is MilesSample.Status.ABORTED
            fleet.check(sample_of(sample))
            await assert_recorded(fleet, sample, streamed)
