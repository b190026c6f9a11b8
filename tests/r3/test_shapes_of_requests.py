"""Batches, several samples, streams and aborted answers: each sequence has its own experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from r3.replays import PROMPT, SAMPLING, replaying, rows_in
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


async def test_each_prompt_of_a_batch_has_its_experts(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        known = PROMPT + (await replay.generate(PROMPT, "s"))["text"] + NEXT
        texts = [known, PROMPT + "Once", PROMPT]
        outputs = await replay.generate(texts, "s")  # type: ignore[arg-type]  # a batch
        assert {output["meta_info"]["routed_experts_start_len"] for output in outputs} == {0}
        for text, output in zip(texts, outputs, strict=True):
            await replay.check(text + output["text"], "s")


async def test_each_of_several_samples_has_its_experts(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"] + NEXT
        outputs = await replay.generate(text, "s", sampling_params=SAMPLING | {"n": 3})
        assert len(outputs) == 3
        for output in outputs:
            assert output["meta_info"]["routed_experts_start_len"] > 0
            await replay.check(text + output["text"], "s")


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_last_event_of_a_stream_has_the_experts(
    start: Start, model: NgramModel, checkpoint: str, incremental: bool
) -> None:
    async with replaying(start, model, checkpoint, incremental_streaming_output=incremental) as replay:
        text = PROMPT
        for _ in range(3):
            events = await replay.generate(text, "s", stream=True)
            assert [event["meta_info"].get("routed_experts") for event in events[:-1]] == [None] * (
                len(events) - 1
            )
            text += "".join(event["text"] for event in events) if incremental else events[-1]["text"]
            answer = await replay.check(text, "s")
            meta = events[-1]["meta_info"]
            wanted = replay.rows(answer["tokens"], meta["routed_experts_start_len"])
            assert rows_in(meta["routed_experts"]).tolist() == wanted.tolist()
            text += NEXT


async def test_a_stream_that_the_client_left_is_filled_by_its_next_turn(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint, tokens_per_second=200) as replay:
        body: dict[str, Any] = {"text": PROMPT, "sampling_params": {**SAMPLING, "max_new_tokens": 100}}
        text = ""
        headers = {"x-session-id": "s"}
        async with replay.running.client.stream(
            "POST", "/generate", json=body | {"stream": True}, headers=headers
        ) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    text = orjson.loads(line[6:])["text"]
                if len(text) > 20:
                    break
        text = PROMPT + text + NEXT
        text += (await replay.generate(text, "s"))["text"]
        await replay.check(text, "s")


async def test_a_large_answer_is_recorded_as_it_passes(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    shape: dict[str, Any] = {"moe_layers": 100, "moe_experts": 300, "moe_topk": 40}
    async with replaying(start, model, checkpoint, **shape) as replay:
        output = await replay.generate(PROMPT * 5, "s", sampling_params=SAMPLING | {"max_new_tokens": 40})
        assert len(output["meta_info"]["routed_experts"]) > 1 << 20
        answer = await replay.retrieve(PROMPT * 5 + output["text"], "s")
        assert answer["experts_exact"], answer["routed_experts_reason"]
        assert answer["routed_experts_shape"] == [answer["token_length"] - 1, 100, 40]
        assert answer["routed_experts"] == output["meta_info"]["routed_experts"]
        stats = await replay.stats()
        assert (
            stats["routed_experts"]["bytes"] == (answer["token_length"] - 1) * 100 * 40 * 2
        )  # 300 experts: uint16


async def test_one_token_after_a_cut_response_needs_no_new_row(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        await replay.generate(PROMPT, "s")
        (leaf,) = (await replay.running.client.get("/trajectories/s")).json()["trajectories"]
        given = leaf["tokens"][:-4]
        body = {"input_ids": given, "session_id": "s", "sampling_params": SAMPLING | {"max_new_tokens": 1}}
        output = (await replay.running.client.post("/generate", json=body)).json()
        assert output["meta_info"]["routed_experts_start_len"] == len(given)
        assert output["meta_info"]["routed_experts"] == ""
        path = "/trajectories/s?return_routed_experts=true"
        records = (await replay.running.client.get(path)).json()["trajectories"]
        assert [record["token_length"] for record in records][-1] == len(given) + 1
        for record in records:
            replay.check_experts(record)
