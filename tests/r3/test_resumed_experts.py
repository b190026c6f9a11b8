"""Aborted generations that are resumed: the client gets the rows of all attempts, and so does the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from plugged import until
from r3.replays import PROMPT, SAMPLING, Replay, replaying, rows_in
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

FLAGS = ("--resume-aborted", "--abort-retry-wait-s", "0")
LONG: dict[str, Any] = {"sampling_params": SAMPLING | {"max_new_tokens": 60}}


async def aborted(replay: Replay, body: dict[str, Any]) -> Any:
    """The answer to a generation that the engine aborts twice."""
    answers = []

    async def generate() -> None:
        answers.append(await replay.generate(PROMPT, "s", **LONG, **body))

    (host,) = replay.hosts
    seen: list[Any] = []

    def runs() -> bool:
        """True when an attempt runs that was not aborted yet, and has some tokens."""
        return any(
            sequence not in seen and len(sequence.context) - len(sequence.input_ids) >= 5
            for sequence in host.engine.scheduler.running.values()
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        for _ in range(2):
            await until(runs)
            seen += host.engine.scheduler.running.values()
            await replay.abort_at_engines()
    return answers[0]


@pytest.mark.parametrize("mode", ["whole", "cumulative", "incremental"])
@pytest.mark.parametrize("asked", [{}, {"return_routed_experts": True, "routed_experts_start_len": 3}])
async def test_rows_of_all_attempts_are_joined(
    start: Start, model: NgramModel, checkpoint: str, mode: str, asked: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        "tokens_per_second": 200,
        "incremental_streaming_output": mode == "incremental",
    }
    async with replaying(start, model, checkpoint, *FLAGS, **settings) as replay:
        output = await aborted(replay, asked | {"stream": mode != "whole"})
        stats = (await replay.running.client.get("/cache_stats")).json()
        assert stats["aborts"] == {"resumed": 2}
        events = [output] if mode == "whole" else output
        text = PROMPT + (
            "".join(one["text"] for one in events) if mode == "incremental" else events[-1]["text"]
        )
        answer = await replay.retrieve(text, "s")
        assert answer["exact"]
        assert answer["token_length"] == events[-1]["meta_info"]["prompt_tokens"] + 60
        start_len = asked.get("routed_experts_start_len", 0)
        told = events[-1]["meta_info"]
        assert told["routed_experts_start_len"] == start_len
        assert rows_in(told["routed_experts"]).tolist() == replay.rows(answer["tokens"], start_len).tolist()
        assert answer["experts_exact"] == (not start_len)
        if not start_len:
            replay.check_experts(answer)
        assert not any("routed_experts" in event["meta_info"] for event in events[:-1])
