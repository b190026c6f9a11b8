"""miles' own session server and agentic rollouts, from PyPI: its samples are the engines' journals."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS, call
from frameworks.fleet import ENDLESS, Fleet, Sample, serving_fleet
from router_core.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

ROLLOUTS = 4
AGENT = "agent of the test"


async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
    """Talk with tools until the model calls none."""
    messages: list[Any] = list(prompt)
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        while messages[-1]["role"] != "assistant":
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, **request_kwargs
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for each in said.tool_calls or ():
                result = call(each.function.name, each.function.arguments)
                messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    return {"last_words": said.content}


@asynccontextmanager
async def rollouts_of(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
    """miles' session server before the router, and its ``generate()`` before both."""
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
    server = SessionServer(args, fleet.url)

    async def roll_out(number: int) -> Any:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{number}. {QUESTION}"},
        ]
        asked = GenerateFnInput(
            state=Namespace(args=args, tokenizer=tokenizer),
            sample=MilesSample(prompt=messages, index=number),
            sampling_params={"temperature": 1.0, "max_new_tokens": 600},
            evaluation=False,
        )
        return (await generate(asked)).samples

    async with serving(server.app) as url:
        args.session_server_ip, args.session_server_port = urlsplit(url).hostname, urlsplit(url).port
        # one for each event loop
        monkeypatch.setattr(http_utils, "_http_client", None)
        http_utils.init_http_client(args)
        with function_registry.temporary(AGENT, agent):
            yield roll_out
        await http_utils._http_client.aclose()
        await server.client.aclose()


async def roll_out_all(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Awaitable[None]]
) -> list[Any]:
    """Samples of some rollouts at once; ``meanwhile`` is called when all have begun."""
    samples: list[Any] = []
    async with rollouts_of(fleet, monkeypatch) as roll_out:

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


async def test_agents_with_tools_while_weights_change(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        samples = await roll_out_all(fleet, monkeypatch, lambda: fleet.update_weights("2"))
        assert len(fleet.entries()) == 3 * ROLLOUTS
        for sample in samples:
            assert sample.status is MilesSample.Status.COMPLETED
            assert sample.metadata["last_words"].strip() == LAST_WORDS
            assert (len(sample.weight_versions), sample.weight_versions[-1]) == (3, "2")
            fleet.check(sample_of(sample))
            record = await fleet.retrieve(fleet.family.tokenizer.decode(sample.tokens))
            assert (record["tokens"], record["loss_mask"]) == (sample.tokens, list(sample_of(sample).mask))
            assert {"1", "2"} <= set(record["generation_versions"])
            for result in RESULTS:
                assert result in sample.response


async def test_an_aborted_turn_is_an_aborted_sample(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for sample in await roll_out_all(fleet, monkeypatch, fleet.abort):
            assert sample.status is MilesSample.Status.ABORTED
            fleet.check(sample_of(sample))
