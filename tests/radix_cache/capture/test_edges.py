"""Shapes that are easily forgotten: only an EOS, a word replaced, versions with names or none, prompt logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_response_of_nothing_but_an_eos_is_one_token_that_was_sampled(
    client: Client, engine: ScriptedEngine
) -> None:
    answer = await client.generate(PROMPT, [engine.eos], "s")
    assert answer["text"] == ""
    known = await client.retrieve(PROMPT, session_id="s")
    assert (known["exact"], known["tokens"], known["loss_mask"]) == (True, *client.last()[:2])
    text = PROMPT + "<|im_end|>" + NEXT
    await client.generate(text, [5, 6], "s")
    known = await client.retrieve(text + engine.tokenizer.decode([5, 6]), session_id="s")
    prompt = engine.tokenizer.encode(PROMPT)
    assert (known["exact"], known["tokens"][: len(prompt) + 1]) == (True, [*prompt, engine.eos])
    assert known["loss_mask"][: len(prompt) + 2] == [0] * len(prompt) + [1, 0]


async def test_word_replaced_by_the_client_counts_as_not_sampled(
    client: Client, engine: ScriptedEngine
) -> None:
    sampled = engine.tokenizer.encode_plain("the <think> is")
    text = PROMPT + (await client.generate(PROMPT, [*sampled, engine.eos], "s"))["text"]
    edited = text.replace("think", "thought") + "<|im_end|>" + NEXT
    answer = await client.generate(edited, [5, 6], "s")
    known = await client.retrieve(edited + answer["text"], session_id="s")
    assert known["exact"]
    assert known["tokens"] == client.last()[0]
    start = len(engine.tokenizer.encode(PROMPT))
    kept = sum(known["loss_mask"]) - 2
    assert known["loss_mask"] == [0] * start + [1] * kept + [0] * (
        len(known["tokens"]) - start - kept - 2
    ) + [1, 1]
    assert known["tokens"][start : start + kept] == sampled[:kept]
    assert engine.tokenizer.decode(sampled[:kept]) in ("the <", "the <th")


@pytest.mark.parametrize("version", ["default", "step-7", "12", None])
async def test_a_version_comes_back_as_the_engine_named_it(
    client: Client, engine: ScriptedEngine, version: str | None
) -> None:
    engine.meta = {"weight_version": version}
    text = PROMPT + (await client.generate(PROMPT, [5, 6]))["text"]
    known = await client.retrieve(text)
    assert known["exact"]
    assert known["generation_versions"][-3:] == [-1, version, version]


async def test_logprobs_of_the_prompt_pass_and_change_nothing(client: Client, engine: ScriptedEngine) -> None:
    told = [[None, 1, None], [-0.5, 2, None]]
    engine.meta = {"input_token_logprobs": told}
    answer = await client.generate(PROMPT, [5, 6], logprob_start_len=0)
    assert engine.asked[-1]["logprob_start_len"] == 0
    assert answer["meta_info"]["input_token_logprobs"] == told
    known = await client.retrieve(PROMPT + answer["text"])
    assert (known["exact"], known["tokens"], known["loss_mask"]) == (True, *client.last()[:2])
    assert bits(known["rollout_logp"]) == client.last()[2]


async def test_continued_response_has_prompt_logprobs_of_first_attempt(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    def answer(ids: list[int], reason: str, **more: Any) -> tuple[int, bytes]:
        meta = {"id": "r", "finish_reason": {"type": reason}, "completion_tokens": len(ids), **more}
        meta["output_token_logprobs"] = [[-1.5, one, None] for one in ids]
        text = engine.tokenizer.decode(ids)
        return 200, orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})

    told = [[None, 1, None], [-0.5, 2, None]]
    flags = ("--resume-aborted", "--abort-retry-wait-s", "0")
    async with routed(start, engine, checkpoint, *flags) as client:
        engine.script += [answer([5], "abort", input_token_logprobs=told), answer([6], "length")]
        body = {"text": PROMPT, "logprob_start_len": 0}
        whole = (await client.running.client.post("/generate", json=body)).json()
    assert [body["logprob_start_len"] for body in engine.asked] == [0, -1]
    assert whole["meta_info"]["input_token_logprobs"] == told
    assert whole["output_ids"] == [5, 6]
