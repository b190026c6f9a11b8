"""``/generate`` in all shapes that do not stream, and the shape of the answers."""

from __future__ import annotations

import base64
from typing import Any

import anyio
import numpy as np
import pytest

from engine.served import CHAT, Serve, Served
from slime_engine.model import NgramModel
from slime_engine.moe import routed_experts

pytestmark = pytest.mark.anyio


async def test_text_gives_text_ids_and_meta_info(engine: Served, model: NgramModel) -> None:
    answer = await engine.generate(text=CHAT, rid="mine", sampling_params={"max_new_tokens": 12})
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(model.tokenizer.encode(CHAT))
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["weight_version"] == "default"
    assert meta["cached_tokens"] == 0
    assert meta["finish_reason"]["type"] in ("length", "stop")
    assert meta["e2e_latency"] > 0
    assert not {"weight_versions", "output_token_logprobs", "routed_experts"} & set(meta)


async def test_ids_are_taken_as_they_are_given(engine: Served, model: NgramModel) -> None:
    prompt = model.tokenizer.encode_plain("<think>")
    await engine.generate(input_ids=prompt, rid="ids")
    (entry,) = await engine.journal("ids")
    assert entry["input_ids"] == prompt


async def test_a_batch_is_answered_in_order_with_numbered_rids(engine: Served) -> None:
    texts = ["one", "two", "three"]
    answers = await engine.generate(text=texts, rid="batch", sampling_params={"max_new_tokens": 2})
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1", "batch_2"]
    for index, text in enumerate(texts):
        (entry,) = await engine.journal(f"batch_{index}")
        assert entry["input_ids"] == (await engine.post("/tokenize", prompt=text)).json()["tokens"]


async def test_a_batch_of_ids_may_have_a_list_of_everything(engine: Served) -> None:
    answers = await engine.generate(
        input_ids=[[1, 2], [3]],
        rid=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "ignore_eos": True}],
        return_logprob=[True, False],
    )
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


async def test_n_samples_of_each_prompt_come_together_with_new_rids(engine: Served) -> None:
    params = {"n": 3, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 4}
    answers = await engine.generate(text=[CHAT, "The"], sampling_params=params, return_logprob=True)
    assert len(answers) == 6
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6
    prompt_tokens = [answer["meta_info"]["prompt_tokens"] for answer in answers]
    assert prompt_tokens == [prompt_tokens[0]] * 3 + [prompt_tokens[3]] * 3
    assert len({str(answer["output_ids"]) for answer in answers[:3]}) == 3
    single = await engine.generate(text=CHAT, sampling_params={**params, "n": 2})
    assert [answer["output_ids"] for answer in single] == [a["output_ids"] for a in answers[:2]]


async def test_a_seed_repeats_a_generation_and_continues_one(engine: Served) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 11}
    first = await engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    again = await engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    other = await engine.generate(input_ids=[1, 2, 3], sampling_params={**params, "sampling_seed": 12})
    rest = await engine.generate(input_ids=[1, 2, 3, *first["output_ids"][:10]], sampling_params=params)
    assert first["output_ids"] == again["output_ids"] != other["output_ids"]
    assert rest["output_ids"][:20] == first["output_ids"][10:]


async def test_an_engine_with_a_seed_repeats_itself(serve: Serve) -> None:
    outputs = []
    for seed in (1, 1, 2, None):
        async with serve(seed=seed) as engine:
            answers = [await engine.generate(text=CHAT) for _ in range(3)]
            outputs.append([answer["output_ids"] for answer in answers])
    assert outputs[0] == outputs[1]
    assert len({str(output) for output in outputs}) == 3
    assert len({str(ids) for ids in outputs[0]}) > 1


async def test_logprob_tuples_have_text_on_request(engine: Served, model: NgramModel) -> None:
    body = {"text": "The capital of", "return_logprob": True, "sampling_params": {"max_new_tokens": 3}}
    plain = (await engine.generate(**body, logprob_start_len=0))["meta_info"]
    told = (await engine.generate(**body, return_text_in_logprobs=True, top_logprobs_num=2))["meta_info"]
    prompt = model.tokenizer.encode("The capital of")
    scores = model.logprobs(prompt, "default")
    assert plain["input_token_logprobs"] == [
        [None if i == 0 else scores[i], token, None] for i, token in enumerate(prompt)
    ]
    assert [text for _, _, text in plain["output_token_logprobs"]] == [None] * 3
    assert told["input_token_logprobs"] == []
    for logprob, token, text in told["output_token_logprobs"]:
        assert logprob < 0
        assert text == model.tokenizer.decode([token])
    assert len(told["output_top_logprobs"]) == 3
    for (logprob, token, _), (best, second) in zip(
        told["output_token_logprobs"], told["output_top_logprobs"], strict=True
    ):
        assert best[0] >= second[0]
        assert logprob <= best[0]
        assert (logprob == best[0]) == (token == best[1])


async def test_prompt_logprobs_begin_where_asked(engine: Served, model: NgramModel) -> None:
    prompt = list(range(1, 300))
    scores = model.logprobs(prompt, "default")
    meta = (
        await engine.generate(
            input_ids=prompt,
            return_logprob=True,
            logprob_start_len=200,
            top_logprobs_num=1,
            sampling_params={"max_new_tokens": 0},
        )
    )["meta_info"]
    assert [one[0] for one in meta["input_token_logprobs"]] == [None, *scores[201:]]
    assert [one[1] for one in meta["input_token_logprobs"]] == prompt[200:]
    assert [top if top is None else len(top) for top in meta["input_top_logprobs"]] == [None] + [1] * 98


async def test_no_new_tokens_is_an_empty_answer(engine: Served) -> None:
    answer = await engine.generate(text="Hello", sampling_params={"max_new_tokens": 0})
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_prompt_ids_are_returned_on_request(engine: Served, model: NgramModel) -> None:
    answer = await engine.generate(text="Hello, world", return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == model.tokenizer.encode("Hello, world")


async def test_an_end_token_stops_and_shows_in_ids_and_logprobs_only(
    engine: Served, model: NgramModel
) -> None:
    answers = await engine.generate(
        text=CHAT, return_logprob=True, sampling_params={"n": 20, "max_new_tokens": 400, "sampling_seed": 0}
    )
    stopped = [one for one in answers if one["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(stopped) > 15
    for answer in stopped:
        end = answer["output_ids"][-1]
        assert end in model.tokenizer.eos_ids
        assert answer["meta_info"]["finish_reason"]["matched"] == end
        assert answer["meta_info"]["output_token_logprobs"][-1][1] == end
        assert answer["text"] == model.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)


async def test_ignore_eos_goes_on_to_the_full_length(engine: Served, model: NgramModel) -> None:
    params = {"max_new_tokens": 300, "ignore_eos": True, "skip_special_tokens": False, "sampling_seed": 0}
    answer = await engine.generate(text=CHAT, sampling_params=params)
    assert len(answer["output_ids"]) == 300
    assert model.tokenizer.eos_ids & set(answer["output_ids"])
    assert answer["text"] == model.tokenizer.decode(answer["output_ids"])


async def test_min_new_tokens_keeps_the_end_away(engine: Served, model: NgramModel) -> None:
    params = {"max_new_tokens": 200, "min_new_tokens": 100, "n": 5, "sampling_seed": 0}
    for answer in await engine.generate(text=CHAT, sampling_params=params):
        assert not model.tokenizer.eos_ids & set(answer["output_ids"][:100])
        assert len(answer["output_ids"]) >= 100


@pytest.mark.parametrize("no_stop_trim", [False, True])
async def test_a_stop_string_ends_the_text(engine: Served, model: NgramModel, no_stop_trim: bool) -> None:
    params = {
        "stop": ["e", "zzz"],
        "no_stop_trim": no_stop_trim,
        "max_new_tokens": 100,
        "n": 20,
        "sampling_seed": 0,
    }
    answers = await engine.generate(text=CHAT, sampling_params=params)
    matched = [one for one in answers if one["meta_info"]["finish_reason"].get("matched") == "e"]
    assert len(matched) > 10
    for answer in matched:
        whole = model.tokenizer.decode(answer["output_ids"])
        assert "e" in whole
        assert "e" not in model.tokenizer.decode(answer["output_ids"][:-1])
        assert answer["text"] == (whole if no_stop_trim else whole[: whole.index("e")])


async def test_a_stop_token_id_ends_the_text(engine: Served, model: NgramModel) -> None:
    (comma,) = model.tokenizer.encode(",")
    params = {"stop_token_ids": [comma], "sampling_seed": 0}
    answers = await engine.generate(text=CHAT, sampling_params={**params, "n": 20})
    ignoring = await engine.generate(
        text=CHAT, sampling_params={**params, "ignore_eos": True, "max_new_tokens": 50}
    )
    matched = [one for one in answers if one["meta_info"]["finish_reason"].get("matched") == comma]
    assert matched
    for answer in matched:
        assert answer["output_ids"].index(comma) == len(answer["output_ids"]) - 1
        assert answer["text"] == model.tokenizer.decode(answer["output_ids"][:-1])
    assert len(ignoring["output_ids"]) == 50


async def test_a_full_length_comes_before_a_stop_at_the_same_token(engine: Served) -> None:
    params = {"max_new_tokens": 400, "sampling_seed": 1}
    stopped = await engine.generate(text=CHAT, sampling_params=params)
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    length = len(stopped["output_ids"])
    full = await engine.generate(text=CHAT, sampling_params={**params, "max_new_tokens": length})
    assert full["output_ids"] == stopped["output_ids"]
    assert full["meta_info"]["finish_reason"] == {"type": "length", "length": length}


async def test_an_open_end_goes_on_until_the_context_is_full(serve: Serve) -> None:
    async with serve(context_length=40) as engine:
        params = {"max_new_tokens": None, "ignore_eos": True}
        answer = await engine.generate(input_ids=[1] * 10, sampling_params=params)
    assert len(answer["output_ids"]) == 29
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_routed_experts_cover_all_tokens_but_the_last(serve: Serve) -> None:
    async with serve(moe_layers=3, moe_experts=32, moe_topk=4) as engine:
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        answer = await engine.generate(**body, return_routed_experts=True, routed_experts_start_len=2)
        without = await engine.generate(**body)
        raw = base64.b64decode(answer["meta_info"]["routed_experts"], validate=True)
        got = np.frombuffer(raw, "<i4").reshape(4 + 6 - 1 - 2, 3, 4)
        wanted = routed_experts([5, 6, 7, 8, *answer["output_ids"]], 2, engine.host.settings)
    assert (got == wanted).all()
    assert answer["meta_info"]["routed_experts_start_len"] == 2
    assert without["meta_info"].keys().isdisjoint(("routed_experts", "routed_experts_start_len"))


async def test_routed_experts_are_left_out_when_the_engine_has_none(engine: Served) -> None:
    answer = await engine.generate(text="Hello", return_routed_experts=True)
    assert "routed_experts" not in answer["meta_info"]


async def test_a_rid_in_flight_is_refused_and_free_again_afterwards(serve: Serve) -> None:
    async with serve(tokens_per_second=20) as engine:
        body: dict[str, Any] = {"text": "Hello", "rid": "same", "sampling_params": {"max_new_tokens": 8}}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.generate(**body))
            await engine.until(lambda scheduler: bool(scheduler.running))
            refused = await engine.generate(400, **body)
            assert "same" in refused["error"]["message"]
        await engine.generate(**body)
        assert len(await engine.journal("same")) == 2
        await engine.generate(400, text=["a", "b"], rid=["x", "x"])
        assert await engine.journal("x") == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text or input_ids"),
    ({"text": "a", "input_ids": [1]}, "text or input_ids"),
    ({"text": ""}, "prompt is empty"),
    ({"text": []}, "list of strings"),
    ({"text": [1]}, "text"),
    ({"text": {}}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], []]}, "prompt is empty"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [99999]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"text": "a", "rid": 1}, "rid"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": "a", "sampling_params": 1}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "samples n"),
    ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "structural_tag"),
    ({"text": "a", "stream": 1}, "stream"),
    ({"text": "a", "return_hidden_states": True}, "hidden states"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"text": "a", "routed_experts_start_len": 99}, "routed_experts_start_len"),
    ({"text": "a " * 100}, "longer than the model's context length"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 64}}, "maximum context length"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_is_told_so(serve: Serve, stream: bool) -> None:
    async with serve(context_length=64) as engine:
        for body, named in BAD:
            answer = await engine.generate(400, **({"stream": stream} | body))
            assert named in answer["error"]["message"]
        assert await engine.journal() == []


async def test_the_default_length_is_cut_to_what_fits(serve: Serve) -> None:
    async with serve(context_length=64) as engine:
        answer = await engine.generate(text="a", sampling_params={"ignore_eos": True})
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 62}
        exact = await engine.generate(text="a", sampling_params={"ignore_eos": True, "max_new_tokens": 63})
        assert len(exact["output_ids"]) == 63


async def test_a_body_that_is_no_json_object_is_told_so(engine: Served) -> None:
    for content in (b"", b"{", b"[1]", b'"a"', b"\xff"):
        answer = await engine.client.post("/generate", content=content)
        assert answer.status_code == 400
        assert "body" in answer.json()["error"]["message"]


async def test_unknown_fields_are_ignored(engine: Served) -> None:
    await engine.generate(text="Hello", priority=3, bootstrap_room=1, image_data=None, novelty={"a": [1]})


async def test_a_long_text_is_tokenised_like_a_short_one(engine: Served, model: NgramModel) -> None:
    text = "The harbour wakes before the town does. " * 400
    answer = await engine.generate(text=text, rid="long", sampling_params={"max_new_tokens": 1})
    (entry,) = await engine.journal("long")
    assert entry["input_ids"] == model.tokenizer.encode(text)
    assert answer["meta_info"]["prompt_tokens"] == len(entry["input_ids"])


async def test_penalties_count_what_was_generated(engine: Served) -> None:
    params = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0}
    plain = await engine.generate(text="The", sampling_params=params)
    varied = await engine.generate(text="The", sampling_params={**params, "frequency_penalty": 2})
    assert len(set(varied["output_ids"])) > len(set(plain["output_ids"]))
