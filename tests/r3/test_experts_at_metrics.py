"""Recorded experts, at ``/metrics``."""

from __future__ import annotations

import pytest

from metrics.scrapes import scraped
from r3.replays import PROMPT, replaying
from routers import Start
from slime_engine.model import NgramModel

pytestmark = pytest.mark.anyio


async def test_recorded_experts_count_by_kind_and_reason(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        answer = await replay.generate(PROMPT, "s")
        await replay.generate(PROMPT, "t", return_routed_experts=False)
        found = await scraped(replay.running.client)
    meta = answer["meta_info"]
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    kind = "kind=routed_experts"
    assert found["slime_expert_rows_total", kind] == rows
    assert (found["slime_expert_turns", kind], found["slime_expert_bytes", kind]) == (1, 6 * rows)
    assert found["slime_expert_missing_total", f"{kind} reason=not_told"] == 1
    assert found["slime_expert_dropped_total", kind] == 0
