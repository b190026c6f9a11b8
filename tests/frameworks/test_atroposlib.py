"""Atropos: the nodes of its managed server are the engines' journals, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("atroposlib", reason="atroposlib is not installed")

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from pydantic import ValidationError

from clients.rolling import QUESTION, SYSTEM
from frameworks.fleet import ENDLESS, Fleet, Sample, serving_fleet
from openai_.chat_models.families import QWEN2_5, Words

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SAYS = (
    Words("Two places “日本語”, which of them? " * 3),
    Words("It is late, I think, in both places."),
    Words("Stay at home: it rains ☔."),
)
ROLLOUTS = 4


def servers_of(fleet: Fleet, session: str) -> Any:
    """Its server manager, before the router; the URL of its one server names the session."""
    config = APIServerConfig(
        server_type="sglang",
        base_url=f"{fleet.url}/sessions/{session}/v1",
        api_key="none",
        model_name="policy",
        tokenizer_name=fleet.checkpoint,
        health_check=False,
        timeout=30,
    )
    return ServerManager([config], slurm=False, testing=False)


async def test_conversations_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *SAYS, family=QWEN2_5, tokens_per_second=200) as fleet:
        nodes: dict[str, Any] = {}

        async def converse(session: str) -> None:
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{session} {QUESTION}"},
            ]
            async with servers_of(fleet, session).managed_server() as managed:
                for _ in SAYS:
                    answer = await managed.chat_completion(
                        messages=messages, n=1, max_tokens=300, temperature=1.0
                    )
                    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    messages.append({"role": "user", "content": "And then?"})
                [nodes[session]] = managed.get_state()["nodes"]

        async with anyio.create_task_group() as rollouts:
            for number in range(ROLLOUTS):
                rollouts.start_soon(converse, str(number))
            await fleet.generating(ROLLOUTS)
            await fleet.update_weights("2")
        assert len(fleet.entries()) == len(SAYS) * ROLLOUTS
        for session, node in nodes.items():
            mask = [int(token != -100) for token in node.masked_tokens]
            assert sum(mask) == sum(
                len(entry.output_ids)
                for entry in fleet.entries()
                if node.tokens[: len(entry.input_ids)] == list(entry.input_ids)
            )
            logprobs = [
                logprob if trained else 0.0 for logprob, trained in zip(node.logprobs, mask, strict=True)
            ]
            fleet.check(Sample(node.tokens, mask, logprobs))
            [record] = await fleet.trajectories(session)
            assert (record["tokens"], record["loss_mask"]) == (node.tokens, mask)
            assert {"1", "2"} <= set(record["generation_versions"])


async def test_several_samples_of_one_prompt(start: Start) -> None:
    async with serving_fleet(start, SAYS[0], family=QWEN2_5) as fleet:
        prompt = fleet.family.tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True
        )
        [server] = servers_of(fleet, "samples").servers
        asked, outputs, logprobs, reasons = await server.tokens_and_logprobs_completion(
            prompt=prompt, n=3, max_tokens=300, temperature=1.0
        )
        sampled = [(list(entry.output_ids), list(entry.output_logprobs)) for entry in fleet.entries()]
        assert sorted(sampled) == sorted(zip(outputs, logprobs, strict=True))
        assert {tuple(entry.input_ids) for entry in fleet.entries()} == {tuple(asked)}
        assert [reason["type"] for reason in reasons] == ["stop"] * 3
        assert len(await fleet.trajectories("samples")) == 3


async def test_an_aborted_turn_is_in_the_records_only(start: Start) -> None:
    """Atropos gives OpenAI's ``Choice`` the finish reason ``abort``, and pydantic refuses it; so with SGLang."""
    async with serving_fleet(start, ENDLESS, family=QWEN2_5, tokens_per_second=100) as fleet:

        async def ask() -> None:
            async with servers_of(fleet, "aborted").managed_server() as managed:
                with pytest.raises(ValidationError, match="finish_reason"):
                    await managed.chat_completion(
                        messages=[{"role": "user", "content": QUESTION}], max_tokens=600
                    )

        async with anyio.create_task_group() as rollouts:
            rollouts.start_soon(ask)
            await fleet.generating(1)
            await fleet.abort()
        [entry] = fleet.entries()
        tokens = [*entry.input_ids, *entry.output_ids]
        [record] = await fleet.trajectories("aborted")
        assert (record["tokens"], record["finish_reason"]["type"]) == (tokens, "abort")
