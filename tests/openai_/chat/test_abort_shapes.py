"""Aborts as SGLang really writes them: nobody sees a text twice, and ids and ``exact`` agree."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from aborting_engine import SHAPES, Shape, logprob_of
from openai_.chat.aborted import (
    ALL,
    MESSAGES,
    PROMPT,
    TAPE,
    TOKENIZER,
    aborting,
    answer_of,
    begin_again,
    engine_of,
    events_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

CUT = 4
SAID = TOKENIZER.decode(TAPE[:CUT])


async def records(running: Running, session: str = "s") -> list[dict[str, Any]]:
    document = (await running.client.get(f"/trajectories/{session}")).json()
    found: list[dict[str, Any]] = document.get("trajectories", [])
    return found


async def contradictions(running: Running) -> Any:
    stats = (await running.client.get("/cache_stats")).json()
    return stats["unrecorded"]


def sampled(record: dict[str, Any]) -> list[int]:
    return [token for token, mask in zip(record["tokens"], record["loss_mask"], strict=True) if mask]


def assert_recorded(record: dict[str, Any], ids: list[int]) -> None:
    """It has exactly ``ids`` behind its prompt, with the logprobs that the engine gave for them."""
    assert (record["inexact_reason"], sampled(record)) == (None, ids)
    size = len(ids)
    assert record["rollout_logp"][-size:] == [logprob_of(place) for place in range(size)]


def ids_of(choices: list[dict[str, Any]]) -> list[int]:
    """All that was told of the tokens, in a stream piece by piece."""
    return [token for choice in choices for token in choice.get("token_ids", ())]


MODES = pytest.mark.parametrize("mode", ["cumulative", "incremental"])
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


@MODES
@EACH_SHAPE
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_chat_stream_that_is_aborted_says_everything_once(
    start: Start, tmp_path: Path, shape: Shape, mode: str, logprobs: bool
) -> None:
    engine = engine_of(shape, mode, CUT)
    async with aborting(start, tmp_path, engine) as running:
        chunks = await events_of(
            running, "/v1/chat/completions", messages=MESSAGES, return_token_ids=True, logprobs=logprobs
        )
        [record] = await records(running)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == SAID
    assert (ids_of(choices), choices[-1]["exact"]) == (TAPE[:CUT], True)
    told = [entry["logprob"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert told == [logprob_of(place) for place in range(CUT)]
    assert_recorded(record, TAPE[:CUT])


@MODES
@EACH_SHAPE
async def test_a_completion_stream_that_is_aborted_says_everything_once(
    start: Start, tmp_path: Path, shape: Shape, mode: str
) -> None:
    engine = engine_of(shape, mode, CUT)
    async with aborting(start, tmp_path, engine) as running:
        chunks = await events_of(running, "/v1/completions", prompt=PROMPT, return_token_ids=True)
        [record] = await records(running)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == SAID
    assert (ids_of(choices), choices[-1]["exact"]) == (TAPE[:CUT], True)
    assert_recorded(record, TAPE[:CUT])


@MODES
@EACH_SHAPE
@pytest.mark.parametrize(
    "body", [{"text": [PROMPT, PROMPT + "a"]}, {"text": PROMPT, "sampling_params": {"n": 2}}]
)
async def test_aborted_streams_of_several_sequences_are_recorded_whole(
    start: Start, tmp_path: Path, shape: Shape, mode: str, body: dict[str, Any]
) -> None:
    engine = engine_of(shape, mode, CUT, CUT)
    async with aborting(start, tmp_path, engine) as running:
        await events_of(running, "/generate", **body)
        found = await records(running)
    assert len(found) == 2  # equal samples are samples each
    for record in found:
        assert_recorded(record, TAPE[:CUT])


@MODES
@EACH_SHAPE
async def test_an_aborted_stream_without_logprobs_is_recorded_whole(
    start: Start, tmp_path: Path, shape: Shape, mode: str
) -> None:
    engine = engine_of(shape, mode, CUT)
    async with aborting(start, tmp_path, engine) as running:
        await events_of(running, "/generate", text=PROMPT, return_logprob=False)
        [record] = await records(running)
        doubts = await contradictions(running)
    assert (record["inexact_reason"], sampled(record), record["response"]) == (
        "no_logprobs",
        TAPE[:CUT],
        SAID,
    )
    assert doubts == {}


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        (shape, mode)
        for shape in SHAPES
        for mode in ("cumulative", "incremental", "whole")
        if (shape, mode) != ("bare", "whole")  # it has no tokens to go on from
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_resumed_generation_is_one_whatever_its_aborts_look_like(
    start: Start, tmp_path: Path, shape: Shape, mode: str, path: str
) -> None:
    engine = engine_of(shape, mode)
    body: dict[str, Any] = {"rid": "r"}
    body |= {"text": PROMPT} if path == "/generate" else {"messages": MESSAGES, "return_token_ids": True}
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        for cuts in ((CUT, 5), (1, 2), (3, 3, 3)):
            begin_again(engine, *cuts)
            body["session"] = session = f"cut at {cuts}"
            if mode == "whole":
                events = [await answer_of(running, path, **body)]
            else:
                events = await events_of(running, path, **body)
            found = await records(running, session)
            assert await contradictions(running) == {}, cuts
            assert len(engine.asked) == len(cuts) + 1, cuts
            if path == "/generate":
                parts = events if mode == "incremental" else events[-1:]
                assert "".join(event["text"] for event in parts) == ALL, cuts
                assert [token for event in parts for token in event["output_ids"]] == TAPE, cuts
                assert events[-1]["meta_info"]["prompt_tokens"] == len(engine.asked[0]["input_ids"]), cuts
                assert events[-1]["meta_info"]["completion_tokens"] == len(TAPE), cuts
            else:
                choices = [choice for event in events for choice in event["choices"]]
                pieces = [choice["message"] if "message" in choice else choice["delta"] for choice in choices]
                assert "".join(piece.get("content") or "" for piece in pieces) == ALL, cuts
                assert (ids_of(choices), choices[-1]["exact"]) == (TAPE, True), cuts
            assert len(found) == 1, cuts
            assert_recorded(found[0], TAPE)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("shape", ["running", "waiting"])
async def test_an_aborted_answer_of_several_sequences_is_resumed_whole(
    start: Start, tmp_path: Path, shape: Shape, path: str
) -> None:
    engine = engine_of(shape, "whole", CUT, CUT, 5)
    body: dict[str, Any] = (
        {"n": 2, "messages": MESSAGES} if path != "/generate" else {"text": [PROMPT, PROMPT + "a"]}
    )
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        told = await answer_of(running, path, return_token_ids=True, **body)
        found = await records(running)
        doubts = await contradictions(running)
    if path == "/generate":
        assert [(one["text"], one["output_ids"]) for one in told] == [(ALL, TAPE)] * 2
        sent = [len(ids) for ids in engine.asked[0]["input_ids"]]
        assert [one["meta_info"]["prompt_tokens"] for one in told] == sent
    else:
        assert [choice["token_ids"] for choice in told["choices"]] == [TAPE] * 2
        assert [choice["message"]["content"] for choice in told["choices"]] == [ALL] * 2
    assert doubts == {}
    for record in found:
        assert_recorded(record, TAPE)


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_aborted_answer_that_is_passed_on_is_recorded(
    start: Start, tmp_path: Path, shape: Shape
) -> None:
    engine = engine_of(shape, "whole", CUT)
    async with aborting(start, tmp_path, engine, "--abort-retries", "0") as running:
        told = await answer_of(running, "/v1/chat/completions", messages=MESSAGES, return_token_ids=True)
        found = await records(running)
    [choice] = told["choices"]
    ids = TAPE[:CUT] if shape != "bare" else []
    assert (choice["message"]["content"] or "", choice["token_ids"]) == (TOKENIZER.decode(ids), ids)
    assert [sampled(record) for record in found] == ([ids] if ids else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_one_is_passed_on_or_resumed_alone(
    start: Start, tmp_path: Path, stream: bool
) -> None:
    engine = engine_of("running", "whole", CUT)
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        if stream:
            told = (await events_of(running, "/generate", text=[PROMPT]))[-1]
        else:
            [told] = await answer_of(running, "/generate", text=[PROMPT])
        [record] = await records(running)
    assert told["output_ids"] == (TAPE[:CUT] if stream else TAPE)
    assert_recorded(record, told["output_ids"])


def shift_index(by: int, event: dict[str, Any], _is_last: bool) -> None:
    event["index"] = int(event["meta_info"]["id"][-1]) + by


@pytest.mark.parametrize("first", [-1, 1])
async def test_events_of_sequences_that_nobody_asked_for_are_nobodys(
    start: Start, tmp_path: Path, first: int
) -> None:
    engine = engine_of("running", "cumulative", CUT, CUT)
    engine.edit = partial(shift_index, first)
    async with aborting(start, tmp_path, engine) as running:
        await events_of(running, "/generate", text=[PROMPT, PROMPT + "a"])
        found = await records(running)
        doubts = await contradictions(running)
    assert doubts["stream_not_understood"] == 1
    assert not any(record["exact"] for record in found)  # the other event is that of another prompt


async def test_a_chat_does_not_take_one_choice_for_another(start: Start, tmp_path: Path) -> None:
    engine = engine_of("running", "cumulative", CUT, CUT)
    engine.edit = partial(shift_index, -1)
    async with aborting(start, tmp_path, engine) as running:
        *_, last = await events_of(running, "/v1/chat/completions", messages=MESSAGES, n=2)
    assert last["error"]["message"] == "the engine's answer was not understood"
