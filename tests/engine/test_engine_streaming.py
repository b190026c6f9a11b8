"""Streams: cumulative, incremental, batches of them, and what they add up to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.served import CHAT, JSONDict, Serve, Served
from slime_engine.model import NgramModel
from slime_engine.requests import parse_generate

pytestmark = pytest.mark.anyio

PARAMS: list[dict[str, Any]] = [
    {"max_new_tokens": 60},
    {"max_new_tokens": 60, "ignore_eos": True, "skip_special_tokens": False},
    {"max_new_tokens": 60, "stop": ["an", "the ", "🙂"]},
    {"max_new_tokens": 60, "stop": ["an", "the "], "no_stop_trim": True},
    {"max_new_tokens": 60, "temperature": 1.6, "ignore_eos": True},
    {"max_new_tokens": 60, "stream_interval": 7},
]


def joined(events: list[JSONDict]) -> JSONDict:
    """Merge the deltas of an incremental stream into one answer."""
    meta = dict(events[-1]["meta_info"])
    meta["output_token_logprobs"] = [
        one for event in events for one in event["meta_info"]["output_token_logprobs"]
    ]
    return {
        "text": "".join(event["text"] for event in events),
        "output_ids": [one for event in events for one in event["output_ids"]],
        "meta_info": meta,
    }


def comparable(answer: JSONDict) -> JSONDict:
    meta = {key: value for key, value in answer["meta_info"].items() if key not in ("id", "e2e_latency")}
    return answer | {"meta_info": meta}


async def test_each_chunk_of_a_cumulative_stream_extends_the_one_before(engine: Served) -> None:
    events = await engine.stream(
        text=CHAT, return_logprob=True, sampling_params={"max_new_tokens": 40, "ignore_eos": True}
    )
    assert len(events) > 3
    for before, after in pairwise(events):
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["output_ids"]) > len(before["output_ids"])
        assert after["meta_info"]["completion_tokens"] == len(after["output_ids"])
        assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
    assert events[-1]["meta_info"]["finish_reason"] is not None
    assert "index" not in events[0]


async def test_an_incremental_stream_has_deltas_and_running_counters(serve: Serve) -> None:
    async with serve(incremental_streaming_output=True) as engine:
        events = await engine.stream(
            text=CHAT, return_logprob=True, sampling_params={"max_new_tokens": 40, "ignore_eos": True}
        )
    assert len(events) > 3
    told = 0
    for event in events:
        told += len(event["output_ids"])
        assert event["meta_info"]["completion_tokens"] == told
        assert event["meta_info"]["output_token_logprobs_length"] == told
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])


@pytest.mark.parametrize("params", PARAMS)
async def test_all_three_forms_say_the_same(serve: Serve, model: NgramModel, params: dict[str, Any]) -> None:
    async with serve() as cumulative, serve(incremental_streaming_output=True) as incremental:
        for seed in range(5):
            body = {
                "text": CHAT,
                "return_logprob": True,
                "sampling_params": params | {"sampling_seed": seed},
            }
            whole = comparable(await cumulative.generate(**body))
            assert comparable((await cumulative.stream(**body))[-1]) == whole
            assert comparable(joined(await incremental.stream(**body))) == whole
            assert comparable(await incremental.generate(**body)) == whole


async def test_no_chunk_has_half_a_character(serve: Serve, model: NgramModel) -> None:
    """A replacement character is in a stream only if the bytes of the whole output are not UTF-8 there."""
    split = 0
    async with serve(seed=3, incremental_streaming_output=True) as engine:
        prompts = ["The word for moon is", "Translate it to Japanese: ", "Thank you, merci,", "Good night. "]
        for prompt in prompts:
            body = {"text": [prompt] * 16, "sampling_params": {"max_new_tokens": 40}}
            streams: dict[int, list[JSONDict]] = {}
            for event in await engine.stream(**body):
                streams.setdefault(event["index"], []).append(event)
            for events in streams.values():
                ids = [one for event in events for one in event["output_ids"]]
                text = "".join(event["text"] for event in events)
                assert text == model.tokenizer.decode(ids, skip_special_tokens=True)
                single = "".join(model.tokenizer.decode([one], skip_special_tokens=True) for one in ids)
                split += single != text
    assert split > 5, "too few characters were split over tokens to show anything"


async def test_chunks_of_a_batch_carry_their_index(engine: Served) -> None:
    body = {"text": ["one", "two"], "sampling_params": {"n": 2, "max_new_tokens": 5, "ignore_eos": True}}
    events = await engine.stream(**body)
    last = {event["index"]: event for event in events}
    assert sorted(last) == [0, 1, 2, 3]
    assert all(len(event["output_ids"]) == 5 for event in last.values())
    by_index: dict[int, set[str]] = {}
    for event in events:
        by_index.setdefault(event["index"], set()).add(event["meta_info"]["id"])
    assert all(len(rids) == 1 for rids in by_index.values())
    assert events[0]["index"] != events[1]["index"], "sequences of a batch are generated together"


async def chunk_sizes(engine: Served, interval: int) -> list[int]:
    params = {"max_new_tokens": 20, "ignore_eos": True, "stream_interval": interval}
    events = await engine.stream(text="The", sampling_params=params)
    return [len(event["output_ids"]) for event in events]


async def test_stream_interval_sends_several_tokens_at_once(serve: Serve) -> None:
    async with serve(incremental_streaming_output=True, tokens_per_second=500) as engine:
        assert await chunk_sizes(engine, 8) == [8, 8, 4]
        assert await chunk_sizes(engine, 1) == [1] * 20


async def test_a_slow_reader_gets_every_token_once(serve: Serve) -> None:
    """Tokens that came while nobody looked are told together."""
    async with serve(incremental_streaming_output=True) as engine:
        manager = engine.host.engine.manager
        body = {"text": "The", "stream": True, "rid": "slow"}
        request = parse_generate(body | {"sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}, 1280)
        outputs = manager.generate(request)
        first = await anext(outputs)
        while manager.rid_to_state:
            await engine.get("/v1/loads")
        rest = [output async for output in outputs]
        (entry,) = await engine.journal("slow")
    assert len(rest) == 1
    assert first["output_ids"] + rest[0]["output_ids"] == entry["output_ids"]
    assert first["text"] + rest[0]["text"] == entry["text"]
    assert len(entry["output_ids"]) == 50
