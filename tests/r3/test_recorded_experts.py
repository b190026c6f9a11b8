"""Experts are recorded with the tokens, and come back aligned with them. The oracle is the engine's own function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from r3.replays import PROMPT, SAMPLING, replaying, rows_in
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


async def test_experts_are_those_of_the_tokens_over_turns(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT
        for turn in range(4):
            text += (await replay.generate(text, "s"))["text"]
            answer = await replay.check(text, "s")
            assert answer["token_length"] > 8 * (turn + 1)
            text += "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


async def test_forks_share_the_rows_of_their_prefix(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        turns = [text + f"<|im_end|>\n<|im_start|>user\nGo {way}.<|im_end|>\n" for way in ("on", "back")]
        ends = [turn + (await replay.generate(turn, "s"))["text"] for turn in turns]
        lengths = [(await replay.check(end, "s"))["token_length"] for end in ends]
        shared = (await replay.check(text, "s"))["token_length"] - 1
        rows = sum(length - 1 - shared for length in lengths) + shared
        assert (await replay.stats())["routed_experts"]["bytes"] == 6 * rows  # 8 experts: a byte each


async def test_samples_of_a_prompt_share_its_rows(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        texts = {PROMPT + (await replay.generate(PROMPT, f"s{number}"))["text"] for number in range(3)}
        answers = [await replay.check(text) for text in texts]
        prompt = answers[0]["loss_mask"].index(1)
        rows = prompt + 3 * (answers[0]["token_length"] - 1 - prompt)
        assert (await replay.stats())["routed_experts"]["bytes"] == 6 * rows


async def test_only_new_rows_are_asked_for(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        # A special token at its end would not be in the text, and the next turn would continue before it.
        seeded = SAMPLING | {"sampling_seed": 1}
        first = await replay.generate(PROMPT, "s", sampling_params=seeded)
        assert first["meta_info"]["routed_experts_start_len"] == 0
        text = PROMPT + first["text"] + "<|im_end|>\n"
        known = first["meta_info"]["prompt_tokens"] + first["meta_info"]["completion_tokens"] - 1
        second = await replay.generate(text, "s")
        meta = second["meta_info"]
        assert meta["routed_experts_start_len"] == known
        told = rows_in(meta["routed_experts"])
        assert len(told) == meta["prompt_tokens"] + meta["completion_tokens"] - 1 - known
        answer = await replay.check(text + second["text"], "s")
        assert told.tolist() == replay.rows(answer["tokens"], known).tolist()


async def test_a_client_that_asks_gets_all_rows(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = (
            PROMPT + (await replay.generate(PROMPT, "s", return_routed_experts=True))["text"] + "<|im_end|>\n"
        )
        output = await replay.generate(text, "s", return_routed_experts=True)
        answer = await replay.check(text + output["text"], "s")
        assert output["meta_info"]["routed_experts_start_len"] == 0
        assert (
            rows_in(output["meta_info"]["routed_experts"]).tolist() == replay.rows(answer["tokens"]).tolist()
        )


async def test_rows_from_the_last_known_token_on_are_enough(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint, "--r3-inject", "when-asked") as replay:
        output = await replay.generate(PROMPT, "s", return_routed_experts=True)
        text = PROMPT + output["text"]
        known = len((await replay.check(text, "s"))["tokens"]) - 1
        text += "<|im_end|>\n"
        asked = {"return_routed_experts": True, "routed_experts_start_len": known}
        text += (await replay.generate(text, "s", **asked))["text"]
        await replay.check(text, "s")


async def test_rows_that_a_client_left_out_are_missed(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        asked = {"return_routed_experts": True, "routed_experts_start_len": 1}
        text = PROMPT + (await replay.generate(PROMPT, "s", **asked))["text"]
        answer = await replay.retrieve(text, "s")
        assert answer["exact"]
        assert (answer["experts_exact"], answer["routed_experts"]) == (False, None)
        assert answer["routed_experts_reason"] == "starts_later"


async def test_a_turn_without_rows_is_filled_by_the_next_one(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s", return_routed_experts=False))["text"]
        assert (await replay.retrieve(text, "s"))["routed_experts_reason"] == "not_told"
        longer = text + "<|im_end|>\n"
        longer += (await replay.generate(longer, "s"))["text"]
        await replay.check(longer, "s")
        await replay.check(text, "s")


async def test_rows_under_other_weights_fill_no_gap(start: Start, model: NgramModel, checkpoint: str) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s", return_routed_experts=False))["text"]
        update = {"new_version": "2", "abort_all_requests": False}
        answer = await replay.running.client.post("/update_weight_version", json=update)
        assert answer.status_code == 200, answer.text
        text += "<|im_end|>\n"
        output = await replay.generate(text, "s")
        assert output["meta_info"]["weight_version"] == "2"
        answer = await replay.retrieve(text + output["text"], "s")
        assert answer["exact"]
        assert (answer["experts_exact"], answer["routed_experts_reason"]) == (False, "not_told")


async def test_a_text_that_no_engine_has_consumed_has_no_rows(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        answer = await replay.retrieve(text + "Never said.", "s")
        assert (answer["experts_exact"], answer["routed_experts_reason"]) == (False, "uncovered_text")
        cut = text[: len(PROMPT) + 9]
        answer = await replay.retrieve(cut, "s")
        assert answer["experts_exact"] == answer["exact"]


async def test_without_the_plugin_nothing_is_recorded(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint, moe_layers=0) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        answer = await replay.retrieve(text, "s")
        assert (answer["experts_exact"], answer["routed_experts_reason"]) == (False, "not_told")
