"""An abort that comes with the token that would have ended the response: it is whole, and nobody goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from transformers import AutoTokenizer

from aborting_engine import AbortingEngine
from deadlines import until
from radix_cache.scripted import ScriptedEngine, bits, routed
from resume.continued import MODES, PROMPT, told
from slime_radix_cache.tokens.checkpoint import eos_ids
from slime_resume.stop_conditions import StopConditions

if TYPE_CHECKING:
    from routers import Start
    from slime_engine.tokenizer import EngineTokenizer

pytestmark = pytest.mark.anyio

FLAGS = ("--resume-aborted", "--abort-retry-wait-s", "0")
#: Tokens that are sampled, and the end that the last of them is.
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eos": ("the town<|im_end|>", {}),
    "other eos": ("the town<|endoftext|>", {"skip_special_tokens": False}),
    "eos shown": ("the town<|im_end|>", {"no_stop_trim": True, "skip_special_tokens": False}),
    "stop id": ("the town</think>", {"stop_token_ids": "</think>"}),
    "stop id shown": ("the town</think>", {"stop_token_ids": "</think>", "no_stop_trim": True}),
    "stop string": ("the town</search>", {"stop": ["never", "</search>"]}),
    "stop string shown": ("the town</search>", {"stop": "</search>", "no_stop_trim": True}),
    "limit": ("the town wakes", {"max_new_tokens": 0}),
    "limit before eos": ("the town<|im_end|>", {"max_new_tokens": 0}),
    "limit at a half character": ("the town ☔", {"max_new_tokens": -1}),
}


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ENDS)
async def test_a_response_that_is_aborted_with_its_last_token_is_whole(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, how: str, mode: str, again: bool
) -> None:
    said, parameters = ENDS[how]
    tape = tokenizer.encode("</sea " + said)
    parameters = dict(parameters)
    if "stop_token_ids" in parameters:
        parameters["stop_token_ids"] = tokenizer.encode(parameters["stop_token_ids"])
    if "max_new_tokens" in parameters:
        parameters["max_new_tokens"] += len(tape)
    end = parameters.get("max_new_tokens", len(tape))
    cuts = [end - 2, end] if again else [end]
    engine = AbortingEngine(tokenizer, [*tape, 300, 301], cuts, incremental=mode == "incremental")
    ids, text, reason = engine.uninterrupted(**parameters)
    assert len(ids) == end
    events = await told(start, engine, checkpoint, mode, **parameters)
    assert len(engine.asked) == len(cuts)
    last = events[-1]
    if mode == "incremental":
        last["text"] = "".join(event["text"] for event in events)
        last["output_ids"] = [one for event in events for one in event["output_ids"]]
    assert (last["text"], last["output_ids"]) == (text, ids)
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [reason]


async def test_an_eos_that_is_to_be_ignored_ends_nothing(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    tape = [*tokenizer.encode("the town<|im_end|>"), 300, 301, 302]
    engine = AbortingEngine(tokenizer, tape, [len(tape) - 3], incremental=False)
    parameters = {"ignore_eos": True, "stop_token_ids": [tape[-4]], "max_new_tokens": len(tape)}
    events = await told(start, engine, checkpoint, "whole", **parameters)
    assert events[-1]["output_ids"] == tape
    assert len(engine.asked) == 2


async def test_each_sequence_of_a_batch_may_end_with_its_abort(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    ids = [[5, 6, engine.eos], [7, 8]]
    prompts = ["the sea", "a hill"]
    async with routed(start, engine, checkpoint, *FLAGS) as client:
        outputs = [_aborted(engine, one, prompt) for one, prompt in zip(ids, prompts, strict=True)]
        engine.script.append((200, orjson.dumps(outputs)))
        engine.script.append([9, engine.eos])
        answers = (await client.running.client.post("/generate", json={"text": prompts})).json()
        stats = await client.stats()
        kept = [await client.retrieve(prompts[0] + answers[0]["text"])]
        kept.append(await client.retrieve(prompts[1] + answers[1]["text"]))
    assert [answer["output_ids"] for answer in answers] == [ids[0], [7, 8, 9, engine.eos]]
    assert engine.asked[1]["input_ids"] == [*engine.tokenizer.encode(prompts[1]), 7, 8]
    assert stats["aborts"] == {"completed": 1, "resumed": 1}
    for record, prompt, answer in zip(kept, prompts, answers, strict=True):
        assert (record["exact"], record["candidates"]) == (True, 1)
        assert record["tokens"] == engine.tokenizer.encode(prompt) + answer["output_ids"]
        assert record["finish_reason"] == {"type": "stop", "matched": engine.eos}
    assert bits(kept[0]["rollout_logp"][-3:]) == bits([-1.5] * 3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_abort_that_was_asked_for_stays_one(
    start: Start, engine: ScriptedEngine, checkpoint: str, stream: bool
) -> None:
    engine.delay = anyio.Event()
    flags = ("--plugin", "control", *FLAGS)  # which tells of aborts
    async with routed(start, engine, checkpoint, *flags) as client, anyio.create_task_group() as tasks:
        output = _aborted(engine, [5, 6, engine.eos], PROMPT)
        output["meta_info"]["id"] = "mine"
        body = orjson.dumps(output)
        if stream:
            engine.media_type, body = "text/event-stream", b"data: %s\n\ndata: [DONE]\n\n" % body
        engine.script.append((200, body))

        async def ask() -> None:
            await until(lambda: bool(engine.asked))
            await client.running.client.post("/abort_request", json={"rid": "mi"})

        tasks.start_soon(ask)
        request = {"text": PROMPT, "rid": "mine", "stream": stream}
        answer = await client.running.client.post("/generate", json=request)
        stats = await client.stats()
    told = orjson.loads(answer.text.split("\n\n")[-3][6:]) if stream else answer.json()
    assert (told["output_ids"], told["text"]) == (output["output_ids"], output["text"])
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert (len(engine.asked), stats["aborts"]) == (1, {"passed_on": 1})


def _aborted(engine: ScriptedEngine, ids: list[int], prompt: str) -> dict[str, Any]:
    return {
        "text": engine.tokenizer.decode(ids, skip_special_tokens=True),
        "output_ids": ids,
        "meta_info": {
            "id": f"of {prompt}",
            "finish_reason": {"type": "abort", "message": "new weights"},
            "prompt_tokens": len(engine.tokenizer.encode(prompt)),
            "completion_tokens": len(ids),
            "weight_version": "1",
            "output_token_logprobs": [[-1.5, one, None] for one in ids],
        },
    }


def test_eos_ids_are_those_that_an_engine_takes(
    tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    (end,) = tokenizer.encode("<|im_end|>")
    loaded: Any = AutoTokenizer.from_pretrained(checkpoint)
    assert eos_ids(tokenizer) == tokenizer.eos_ids
    assert eos_ids(loaded) == {end}
    assert eos_ids(loaded, checkpoint) == tokenizer.eos_ids
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_ids(loaded, str(tmp_path)) == {end, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 8]}))
    assert eos_ids(loaded, str(tmp_path)) == {end, 7, 8}
    loaded.add_tokens(["<|eom_id|>"], special_tokens=True)
    assert eos_ids(loaded) == {end, len(tokenizer.token_bytes)}


@pytest.mark.parametrize("last", ["☔", "a☔"], ids=["character", "word"])
def test_a_trimmed_token_leaves_the_half_character_before_it(tokenizer: EngineTokenizer, last: str) -> None:
    """As the engine shows it, which decodes all tokens but the one that stopped it."""
    pieces = [tokenizer.token_bytes.index(bytes([one])) for one in last.encode()]
    ids = [*tokenizer.encode("the "), *pieces]
    stop_conditions = StopConditions(tokenizer, ())
    trimmed = stop_conditions.trimmed("the " + last, ids, {}, {"type": "stop", "matched": ids[-1]})
    assert trimmed == tokenizer.decode(ids[:-1])
