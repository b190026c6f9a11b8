"""The steered engine says what its script wants, in tokens of its own choice, and its journal has them."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from openai_.chat_models.families import FAMILIES, LLAMA, MISTRAL, QWEN2_5, QWEN3, Call, Family, Words
from openai_.chat_models.steered import Noise, Steered, SteeredModel, by_text, in_turn, speaking, steered
from slime_engine.model import load_model, log_softmax

pytestmark = pytest.mark.anyio

WORDS = Words(
    "Grüße 😀 aus 日本.", "Is it <b>so</b>?", (Call("weather", '{"city":  "Z\\u00fcrich", "ä": [1, 2]}'),)
)


async def generate(engine: Steered, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=20) as client:
        answer = await client.post("/generate", json={"return_logprob": True, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


async def streamed(engine: Steered, **body: Any) -> list[dict[str, Any]]:
    async with (
        httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=20) as client,
        client.stream("POST", "/generate", json={"stream": True, "return_logprob": True, **body}) as answer,
    ):
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [orjson.loads(line) for line in lines]


def asking(family: Family) -> str:
    return family.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, **family.variables
    )


def seeded(seed: int = 0, max_new_tokens: int = 500, **more: Any) -> dict[str, Any]:
    return {"sampling_seed": seed, "max_new_tokens": max_new_tokens, **more}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_an_answer_reads_as_the_script_has_it_and_is_spelt_otherwise(family: Family) -> None:
    prompt, tokenizer = asking(family), family.tokenizer
    said = family.says(WORDS, prompt)
    (eos,) = tokenizer.encode(family.eos)
    async with speaking(family, by_text(tokenizer, lambda text: [family.says(WORDS, text)])) as engine:
        answers = [
            await generate(engine, text=prompt, sampling_params=seeded(seed, skip_special_tokens=False))
            for seed in range(6)
        ]
        journal = engine.journal()
    for answer, entry in zip(answers, journal, strict=True):
        *shown, last = entry.output_ids
        assert answer["text"] == entry.text == tokenizer.decode(shown) == said
        assert answer["output_ids"] == [*shown, last]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
        assert last == eos
        assert shown != tokenizer.encode(said)
    assert len({tuple(entry.output_ids) for entry in journal}) == len(journal)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_streams_of_both_kinds_say_what_the_whole_answer_says(family: Family) -> None:
    prompt, said = asking(family), family.says(WORDS, asking(family))
    body = {"text": prompt, "top_logprobs_num": 2, "sampling_params": seeded()}
    async with speaking(family, lambda ids: [said]) as engine:
        whole = await generate(engine, **body)
        cumulative = await streamed(engine, **body)
    async with speaking(family, lambda ids: [said], incremental_streaming_output=True) as engine:
        incremental = await streamed(engine, **body)
    names = ("output_token_logprobs", "output_top_logprobs")
    assert (cumulative[-1]["text"], cumulative[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert [cumulative[-1]["meta_info"][name] for name in names] == [
        whole["meta_info"][name] for name in names
    ]
    assert "".join(event["text"] for event in incremental) == whole["text"]
    assert [token_id for event in incremental for token_id in event["output_ids"]] == whole["output_ids"]
    for name in names:
        assert [one for event in incremental for one in event["meta_info"][name]] == whole["meta_info"][name]
    visible = [token_id for token_id in whole["output_ids"] if token_id not in family.tokenizer.special_ids]
    assert whole["text"] == family.tokenizer.decode(visible)


async def test_the_journal_has_what_was_consumed_and_the_models_own_logprobs() -> None:
    tokenizer = QWEN3.tokenizer
    model = SteeredModel(Noise(tokenizer), in_turn("The harbour wakes.", "It sleeps."), QWEN3.eos)
    first = tokenizer.encode(asking(QWEN3))
    async with steered(model, weight_version="7") as engine:
        answer = await generate(engine, input_ids=first)
        second = [*first, *answer["output_ids"], *tokenizer.encode("\n" + asking(QWEN3))]
        await generate(engine, input_ids=second)
        journal = engine.journal()
    assert [entry.input_ids.tolist() for entry in journal] == [first, second] == model.asked
    assert [entry.text for entry in journal] == ["The harbour wakes.", "It sleeps."]
    told = [[logprob, token_id] for logprob, token_id, _ in answer["meta_info"]["output_token_logprobs"]]
    assert told == [
        list(pair) for pair in zip(journal[0].output_logprobs, journal[0].output_ids, strict=True)
    ]
    for place, (logprob, token_id) in enumerate(told, len(first)):
        logits = model.next_logits([*first, *answer["output_ids"]], "7", place)
        assert np.isfinite(logits).all()
        assert logprob == log_softmax(logits)[token_id]


async def test_an_answer_that_is_cut_has_no_end_token() -> None:
    said = "A sentence that is much too long for five tokens."
    async with speaking(LLAMA, lambda ids: [said]) as engine:
        cut = await generate(engine, text=asking(LLAMA), sampling_params=seeded(max_new_tokens=5))
        stopped = await generate(engine, text=asking(LLAMA), sampling_params=seeded(stop="too"))
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert said.startswith(cut["text"])
    assert len(cut["output_ids"]) == 5
    assert stopped["text"] == "A sentence that is much "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "too"}


async def test_a_prompt_with_a_part_of_an_answer_goes_on_with_it() -> None:
    said = "A sentence that is much too long for five tokens."
    model = SteeredModel(Noise(LLAMA.tokenizer), in_turn(said), LLAMA.eos)
    prompt = LLAMA.tokenizer.encode(asking(LLAMA))
    async with steered(model) as engine:
        cut = await generate(engine, input_ids=prompt, sampling_params=seeded(max_new_tokens=5))
        rest = await generate(engine, input_ids=prompt + cut["output_ids"], sampling_params=seeded())
    assert cut["text"] + rest["text"] == said
    assert model.asked == [prompt]


async def test_each_sample_draws_one_of_the_answers() -> None:
    async with speaking(QWEN2_5, lambda ids: ["Yes.", "No, never."]) as engine:
        prompts = [asking(QWEN2_5), asking(QWEN2_5) + "\n"]
        answers = await generate(engine, text=prompts, sampling_params=seeded(n=8))
    assert len(answers) == 16
    assert {answer["text"] for answer in answers} == {"Yes.", "No, never."}


async def test_ids_are_sampled_as_they_are() -> None:
    random, tokenizer = Random(0), QWEN3.tokenizer
    ids = tuple(random.choice(range(len(tokenizer.token_bytes) - 8)) for _ in range(20))
    async with speaking(QWEN3, lambda _: [ids]) as engine:
        answer = await generate(engine, text=asking(QWEN3))
    assert answer["output_ids"] == [*ids, *tokenizer.encode(QWEN3.eos)]
    assert answer["text"] == tokenizer.decode(ids)
    assert "\ufffd" in answer["text"]


async def test_special_tokens_in_an_answer_are_those_tokens() -> None:
    said = " I look.[TOOL_CALLS] []"
    async with speaking(MISTRAL, lambda ids: [said]) as engine:
        for skipped, text in ((True, " I look. []"), (False, said)):
            params = seeded(skip_special_tokens=skipped)
            answer = await generate(engine, text=asking(MISTRAL), sampling_params=params)
            assert answer["text"] == text
            assert MISTRAL.tokenizer.encode("[TOOL_CALLS]")[0] in answer["output_ids"]


async def test_another_end_token_may_be_written_out() -> None:
    async with speaking(QWEN3, lambda ids: ["Yes.<|endoftext|> and more"]) as engine:
        answer = await generate(engine, text=asking(QWEN3))
    assert answer["text"] == "Yes."
    assert answer["output_ids"][-1:] == QWEN3.tokenizer.encode("<|endoftext|>")


async def test_scoring_requests_ask_the_script_nothing() -> None:
    model = SteeredModel(Noise(QWEN3.tokenizer), in_turn("Yes."), QWEN3.eos)
    async with steered(model) as engine:
        answer = await generate(engine, text=asking(QWEN3), logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]
    assert answer["text"] == "Yes."
    assert len(model.asked) == 1


async def test_a_prompt_too_many_is_told() -> None:
    async with (
        speaking(QWEN3, in_turn()) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        answer = await client.post("/generate", json={"text": asking(QWEN3)})
    assert answer.status_code == 500
    assert "0 answers, and one more prompt" in answer.text


async def test_only_a_steered_model_obeys_a_schema_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema = {"sampling_params": seeded(json_schema='{"type":"object"}')}
    async with speaking(QWEN3, lambda ids: ['{"a": 1}']) as engine:
        assert (await generate(engine, text=asking(QWEN3), **schema))["text"] == '{"a": 1}'
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            asked = {"prompt": asking(QWEN3), **schema["sampling_params"]}
            answer = await client.post("/v1/completions", json=asked)
        assert answer.json()["choices"][0]["text"] == '{"a": 1}'
    async with (
        steered(Noise(QWEN3.tokenizer)) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        answer = await client.post("/generate", json={"text": asking(QWEN3), **schema})
    assert answer.status_code == 400
    assert "json_schema needs the library llguidance" in answer.text


async def test_the_embedded_engines_own_model_can_be_steered_and_left_alone() -> None:
    base = load_model()
    end = "<|im_end|>"
    call = QWEN2_5.says(Words(calls=(Call("weather", '{"city": "Oslo"}'),)), "")

    def reply(prompt: str) -> list[str]:
        return [call] if "weather" in prompt else []

    model = SteeredModel(base, by_text(base.tokenizer, reply), end)
    async with steered(model) as engine:
        asked = [
            base.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )
            for text in ("The weather?", "A story?")
        ]
        answers = [await generate(engine, text=text, sampling_params=seeded()) for text in asked]
    async with steered(base) as engine:
        alone = await generate(engine, text=asked[1], sampling_params=seeded())
    assert answers[0]["text"] == call
    assert answers[1]["output_ids"] == alone["output_ids"]
