"""Weights that change within an answer: its rows are exact only if the engine did not compute its tokens again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest

from plugged import until
from r3.replays import PROMPT, SAMPLING, Replay, replaying
from r3.versioned import moved, recompute, versioned_experts
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

FLAGS = ("--resume-aborted", "--abort-retry-wait-s", "0")
LONG: dict[str, Any] = {"sampling_params": SAMPLING | {"max_new_tokens": 40}}
Mode = Literal["in_place", "retract"]


async def updated(replay: Replay, mode: Mode, *, aborts: bool = False, **body: Any) -> Any:
    """The answer to a generation within which the weights change. ``aborts``: then the engine also aborts it."""
    answers = []

    async def generate() -> None:
        answers.append(await replay.generate(PROMPT, "s", **LONG, **body))

    async def has_tokens(count: int) -> None:
        sequences = replay.hosts[0].engine.scheduler.running
        await until(lambda: any(one.completion_tokens >= count for one in sequences.values()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await has_tokens(5)
        await replay.at_engines("/pause_generation", mode=mode)
        if mode == "retract":
            recompute(replay)
        await replay.at_engines("/update_weight_version", new_version="3", abort_all_requests=False)
        await replay.at_engines("/continue_generation")
        if aborts:
            await has_tokens(15)
            await replay.abort_at_engines()
    return answers[0][-1] if body.get("stream") else answers[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_rows_that_were_computed_again_are_not_exact(
    start: Start,
    model: NgramModel,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
    aborts: bool,
    stream: bool,
) -> None:
    versioned_experts(monkeypatch)
    async with replaying(start, model, checkpoint, *FLAGS, tokens_per_second=400) as replay:
        answer = await updated(replay, mode, aborts=aborts, stream=stream)
        text = PROMPT + answer["text"]
        record = await replay.retrieve(text, "s")
        assert record["exact"], record["inexact_reason"]
        versions = record["generation_versions"]
        first = versions.index("3")
        assert versions[first - 5 : first] == ["default"] * 5
        if mode == "in_place":
            assert record["experts_exact"], record["routed_experts_reason"]
            # The row before a token is of the pass from which it was sampled.
            assert moved(replay, record) == [0] * (first - 1) + [3] * (len(versions) - first)
        else:
            assert (record["experts_exact"], record["routed_experts"]) == (False, None)
            assert record["routed_experts_reason"] == ("not_told" if aborts else "other_weight_version")
        assert ("routed_experts" in answer["meta_info"]) is (mode == "in_place" or not aborts)
        # The next turn is of one version, and cannot tell the rows of the first one.
        text += "<|im_end|>\n"
        text += (await replay.generate(text, "s"))["text"]
        later = await replay.retrieve(text, "s")
        assert later["experts_exact"] is record["experts_exact"]
        cut = await replay.retrieve(PROMPT + answer["text"][:8], "s")
        assert cut["experts_exact"] is (record["experts_exact"] and cut["exact"])
