"""SkyRL's client of a remote engine, without Ray: its responses, batch by batch, are the engines' journals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("skyrl_train", reason="skyrl-train is not installed")

from openai.types.chat import ChatCompletion
from skyrl_train.inference_engines.remote_inference_engine import create_remote_inference_engines
from transformers import AutoTokenizer

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet
from openai_.chat_models.families import QWEN2_5, Words

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SAYS = (
    Words("Two places “日本語”, which of them? " * 3),
    Words("It is late, I think, in both places."),
    Words("Stay at home: it rains ☔."),
)
NEXT = "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
ROLLOUTS = 4


def engine_of(fleet: Fleet) -> Any:
    """Its one engine, which is the router."""
    [engine] = create_remote_inference_engines(
        urls=[fleet.url.removeprefix("http://")],
        model_name="policy",
        engine_backend="sglang",
        tokenizer=AutoTokenizer.from_pretrained(fleet.checkpoint),
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        expert_parallel_size=1,
    )
    return engine


class Completions:
    """Its chats, for an agent; the body of each names the session."""

    def __init__(self, engine: Any, session: str) -> None:
        self._engine, self._session = engine, session

    async def create(self, **asked: Any) -> ChatCompletion:
        answer = await self._engine.chat_completion({"json": {"session_id": self._session, **asked}})
        return ChatCompletion.model_validate(answer)


async def generate(
    fleet: Fleet, turns: int, meanwhile: Callable[[], Awaitable[None]]
) -> tuple[list[list[int]], list[str]]:
    """All tokens of a batch of conversations, and why each ended; ``meanwhile`` is called in the first turn."""
    tokenizer = fleet.family.tokenizer
    engine = engine_of(fleet)
    questions = [{"role": "user", "content": f"{number}. {QUESTION}"} for number in range(ROLLOUTS)]
    tokens = [
        tokenizer.encode(tokenizer.apply_chat_template([question], add_generation_prompt=True))
        for question in questions
    ]
    reasons: list[str] = []

    async def go() -> None:
        for turn in range(turns):
            suffix = tokenizer.encode(NEXT) if turn else []
            prompts = [ids + suffix for ids in tokens]
            output = await engine.generate(
                {"prompt_token_ids": prompts, "sampling_params": {"max_new_tokens": 600, "temperature": 1.0}}
            )
            tokens[:] = [
                ids + response for ids, response in zip(prompts, output["response_ids"], strict=True)
            ]
            reasons[:] = output["stop_reasons"]

    async with anyio.create_task_group() as rollouts:
        rollouts.start_soon(go)
        await fleet.generating(ROLLOUTS)
        await meanwhile()
    return tokens, reasons


async def test_batches_of_turns_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *SAYS, family=QWEN2_5, tokens_per_second=200) as fleet:
        tokens, reasons = await generate(fleet, len(SAYS), lambda: fleet.update_weights("2"))
        assert reasons == ["stop"] * ROLLOUTS
        assert len(fleet.entries()) == len(SAYS) * ROLLOUTS
        for ids in tokens:
            record = await fleet.retrieve(fleet.family.tokenizer.decode(ids))
            assert record["tokens"] == ids
            assert {"1", "2"} <= set(record["generation_versions"])


async def test_aborted_responses_are_kept_as_far_as_they_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, family=QWEN2_5, tokens_per_second=100) as fleet:
        tokens, reasons = await generate(fleet, 1, fleet.abort)
        assert reasons == ["abort"] * ROLLOUTS
        for ids in tokens:
            record = await fleet.retrieve(fleet.family.tokenizer.decode(ids))
            assert (record["tokens"], record["finish_reason"]["type"]) == (ids, "abort")


async def test_chats_of_a_session_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        engine = engine_of(fleet)

        async def one(session: str) -> None:
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{session}. {QUESTION}"},
            ]
            chats = Completions(engine, session)
            await converse(chats, messages, streamed=False, model="policy", tools=TOOLS)
            assert messages[-1]["content"].strip() == LAST_WORDS

        sessions = [str(number) for number in range(ROLLOUTS)]
        async with anyio.create_task_group() as rollouts:
            for session in sessions:
                rollouts.start_soon(one, session)
            await fleet.generating(ROLLOUTS)
            await fleet.update_weights("2")
        for session in sessions:
            [record] = await fleet.trajectories(session)
            assert {"1", "2"} <= set(record["generation_versions"])
            for result in RESULTS:
                assert result in record["text"]
