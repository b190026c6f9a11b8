"""TRL: the rollouts of its asynchronous GRPO, which render each turn anew, are trained on what was sampled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import from_thread, to_thread

from deadlines import HANG_S

pytest.importorskip("trl", reason="trl is not installed")

from accelerate import PartialState
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, clock, weather
from frameworks.fleet import ENDLESS, Fleet, Sample, serving_fleet
from openai_.chat_models.families import QWEN2_5

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

ROLLOUTS = 4


def prompts() -> Iterator[dict[str, Any]]:
    for number in count():
        system, user = (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{number}. {QUESTION}"},
        )
        yield {"prompt": [system, user]}


def rewards(completions: list[Any], **more: Any) -> list[float]:
    return [float(completion[-1]["content"].strip() == LAST_WORDS) for completion in completions]


@contextmanager
def rolling_out(fleet: Fleet) -> Iterator[Any]:
    """Its rollouts in a thread, not a process; they are in the ``rollout_buffer``."""
    PartialState(cpu=True)  # its logger wants one
    tokenizer: Any = AutoTokenizer.from_pretrained(fleet.checkpoint)
    tokenizer.chat_template = qwen2_5_chat_template  # it reads calls of templates that it knows
    loop = _AsyncRolloutLoop(
        model_name="policy",
        dataset=prompts(),
        reward_funcs=[rewards],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=queue.Queue(),
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        tools=[weather, clock],
        num_generations=1,
        max_inflight_tasks=ROLLOUTS,
        vllm_server_url=fleet.url,
        max_tokens=600,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join()


async def roll_out(fleet: Fleet, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> list[Any]:
    """Samples of some conversations; ``meanwhile`` is called when all have begun."""

    def in_thread() -> list[Any]:
        with rolling_out(fleet) as loop:
            from_thread.run(fleet.generating, ROLLOUTS)
            from_thread.run(meanwhile)
            return [loop.rollout_buffer.get(timeout=30) for _ in range(ROLLOUTS)]

    with anyio.fail_after(HANG_S):
        return await to_thread.run_sync(in_thread)


def sample_of(sample: Any) -> Sample:
    return Sample(sample.input_ids.tolist(), sample.completion_mask.tolist(), sample.old_log_probs)


async def test_conversations_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, family=QWEN2_5, tokens_per_second=300) as fleet:
        for sample in await roll_out(fleet, lambda: fleet.update_weights("2")):
            assert (sample.completion[-1]["content"].strip(), sample.metrics["reward"]) == (LAST_WORDS, 1.0)
            fleet.check(sample_of(sample))
            text = fleet.family.tokenizer.decode(sample.input_ids.tolist())
            for result in RESULTS:
                assert result in text
        versions = [set(entry.as_json()["output_versions"]) for entry in fleet.entries()]
        assert {"1", "2"} in versions, "new weights in the middle of a turn"


async def test_an_aborted_turn_is_trained_on_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, family=QWEN2_5, tokens_per_second=300) as fleet:
        for sample in await roll_out(fleet, fleet.abort):
            assert sample.completion[-1]["content"].startswith("It rains")
            fleet.check(sample_of(sample))
        ends = [entry.finish_reason["type"] for entry in fleet.entries() if entry.finish_reason]
        assert ends.count("abort") == ROLLOUTS
