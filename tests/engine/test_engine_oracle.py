"""The journal is beyond doubt: it agrees with every reply and with the model itself, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from engine.served import CHAT, JSONDict, Serve, Served
from slime_engine.journal import Journal
from slime_engine.model import NgramModel

pytestmark = pytest.mark.anyio

PROMPTS = [
    CHAT,
    "The quick brown fox",
    "<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "Notes: 🌞 京都 naïve",
    "def add(",
]


def random_body(dice: random.Random) -> JSONDict:
    params: dict[str, Any] = {"max_new_tokens": dice.choice([0, 1, 5, 40, 120])}
    options = {
        "temperature": dice.choice([0.0, 0.3, 1.0, 1.5]),
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "stop": dice.choice([["."], ["the", "\n"], "</think>"]),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": dice.randrange(100),
    }
    params |= {name: value for name, value in options.items() if dice.random() < 0.3}
    return {"text": dice.choice(PROMPTS), "sampling_params": params, "return_logprob": True}


def agrees(model: NgramModel, entry: JSONDict, answer: JSONDict) -> None:
    """The reply says what the journal says, and the model can be asked again with the same result."""
    meta = answer["meta_info"]
    assert entry["rid"] == meta["id"]
    assert entry["output_ids"] == answer["output_ids"]
    assert entry["text"] == answer["text"]
    assert entry["finish_reason"] == meta["finish_reason"]
    assert entry["aborted"] == (meta["finish_reason"]["type"] == "abort")
    count = len(entry["output_ids"])
    assert len(entry["output_logprobs"]) == len(entry["output_versions"]) == count
    if "prompt_tokens" in meta:
        assert meta["prompt_tokens"] == len(entry["input_ids"])
        tuples = meta["output_token_logprobs"]
        assert [one[0] for one in tuples] == entry["output_logprobs"]
        assert [one[1] for one in tuples] == entry["output_ids"]
    versions = entry["output_versions"]
    if versions:
        assert meta["weight_version"] == versions[-1]
    if "weight_versions" in meta:
        spans = [
            span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])
        ]
        assert spans == versions
    else:
        assert len(set(versions)) <= 1
    scores = model.logprobs(
        entry["input_ids"] + entry["output_ids"],
        versions,
        start=len(entry["input_ids"]),
        temperature=entry["temperature"],
    )
    assert scores == entry["output_logprobs"], "to the last bit"


async def one_request(engine: Served, rid: str, body: JSONDict, *, stream: bool) -> JSONDict:
    if not stream:
        answer: JSONDict = await engine.generate(**body, rid=rid)
        return answer
    return (await engine.stream(**body, rid=rid))[-1]


async def disturb(engine: Served, dice: random.Random) -> None:
    """Abort requests and update weights meanwhile, as impatient clients and a trainer do."""
    version = 1
    while True:
        await anyio.sleep(0.005)
        running = list(engine.host.engine.scheduler.running)
        action = dice.randrange(2)
        if action == 0 and running:
            await engine.post("/abort_request", rid=dice.choice(running))
        elif action == 1:
            version += 1
            mode = dice.choice(["in_place", "retract"])
            await engine.post("/pause_generation", mode=mode)
            await engine.post("/update_weights_from_distributed", weight_version=str(version))
            await engine.post("/continue_generation")


async def test_journal_replies_and_model_agree_under_everything_at_once(
    serve: Serve, model: NgramModel
) -> None:
    dice = random.Random(8)
    answers: dict[str, JSONDict] = {}
    bodies = {f"r{number}": random_body(dice) for number in range(200)}
    async with serve(tokens_per_second=400, max_running_requests=24) as engine:

        async def ask(rid: str) -> None:
            stream = int(rid[1:]) % 3 == 0
            answers[rid] = await one_request(engine, rid, bodies[rid], stream=stream)

        async with anyio.create_task_group() as trouble:
            trouble.start_soon(disturb, engine, dice)
            async with anyio.create_task_group() as clients:
                for rid in bodies:
                    clients.start_soon(ask, rid)
            trouble.cancel_scope.cancel()
        await engine.post("/continue_generation")
        entries = await engine.journal()
    assert [entry["index"] for entry in entries] == list(range(200))
    assert {entry["rid"] for entry in entries} == set(bodies)
    for entry in entries:
        agrees(model, entry, answers[entry["rid"]])
        text = bodies[entry["rid"]]["text"]
        assert entry["input_ids"] == model.tokenizer.encode(text)
    kinds = {entry["finish_reason"]["type"] for entry in entries}
    assert kinds == {"stop", "length", "abort"}
    assert sum(len(set(entry["output_versions"])) > 1 for entry in entries) > 0
    assert sum(entry["aborted"] and bool(entry["output_ids"]) for entry in entries) > 0


async def test_many_samples_are_tokens_that_no_tokenizer_would_make(
    engine: Served, model: NgramModel
) -> None:
    """Also with markup spelt out in ordinary tokens, and characters split over tokens."""
    thinking = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    params = {"n": 200, "skip_special_tokens": False, "sampling_seed": 0}
    answers = await engine.generate(text=thinking, sampling_params=params)
    tokenizer = model.tokenizer
    differ = spelt_out = ended = 0
    spelling = str(tokenizer.encode_plain("<think>"))[1:-1]
    for answer in answers:
        reason = answer["meta_info"]["finish_reason"]
        visible = answer["output_ids"][:-1] if reason["type"] == "stop" else answer["output_ids"]
        differ += tokenizer.encode(answer["text"]) != visible
        spelt_out += spelling in str(visible)
        ended += reason["type"] == "stop"
    assert differ > 60
    assert spelt_out > 2
    assert ended > 150, "most answers end by themselves"


async def test_a_journal_entry_is_complete_when_the_stream_says_so(engine: Served) -> None:
    for number in range(20):
        rid = f"s{number}"
        body = {"text": CHAT, "rid": rid, "sampling_params": {"max_new_tokens": 9}}
        async for event in engine.events("/generate", **body):
            if event["meta_info"]["finish_reason"] is not None:
                (entry,) = engine.host.engine.journal.entries(rid)
                assert entry.finish_reason == event["meta_info"]["finish_reason"]
                assert entry.text == event["text"]
                assert entry.output_ids.tolist() == event["output_ids"]


async def test_the_journal_can_be_asked_for_one_rid_and_says_what_it_forgot(serve: Serve) -> None:
    async with serve(journal_size=3) as engine:
        for rid in ("a", "b", "a", "c", "d"):
            await engine.generate(text="x", rid=rid)
        journal = await engine.get("/journal")
        assert journal["dropped"] == 2
        assert [(one["index"], one["rid"]) for one in journal["entries"]] == [(2, "a"), (3, "c"), (4, "d")]
        assert [one["index"] for one in await engine.journal("a")] == [2]
        assert await engine.journal("nobody") == []


async def test_a_running_request_shows_in_the_journal_without_an_end(serve: Serve) -> None:
    async with serve(tokens_per_second=100) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.generate(text="x", rid="r"))
        await engine.until(lambda s: "r" in s.running and s.running["r"].completion_tokens > 2)
        (entry,) = await engine.journal("r")
        assert (entry["finish_reason"], entry["text"], entry["aborted"]) == (None, None, False)
        assert len(entry["output_ids"]) == len(entry["output_logprobs"]) == len(entry["output_versions"]) > 2
        await engine.post("/abort_request", abort_all=True)


def test_doubles_survive_the_journal() -> None:
    entry = Journal(1).open("r", [1], 1.0)
    values = [-0.1, -1e-300, -123.456789012345678, 0.0]
    for value in values:
        entry.append(1, value, "v")
    assert entry.as_json()["output_logprobs"] == values
