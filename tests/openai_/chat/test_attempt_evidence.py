"""Each attempt of a resumed generation is evidence by itself, or the response made of them is doubted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat.aborted import (
    ALL,
    MESSAGES,
    PROMPT,
    TAPE,
    aborting,
    answer_of,
    begin_again,
    engine_of,
    events_of,
)
from slime_radix_cache.capture.turns import Turns

if TYPE_CHECKING:
    from pathlib import Path

    from aborting_engine import AbortingEngine
    from routers import Start

pytestmark = pytest.mark.anyio

DOUBT = "engine_contradicts_itself"
LIES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt_tokens": 3},
    "prompt as text": {"prompt_tokens": "13"},
    "name": {"id": "of another one"},
    "count": {"completion_tokens": 9},
    "versions": {"weight_versions": [{"version": "1", "start": 0, "end": 1}]},
    "broken versions": {"weight_versions": [{"begin": 0}]},
    "logprobs": {"output_token_logprobs": [[-1.0, 5, None]] * 9},
    "broken logprobs": {"output_token_logprobs": [[None]]},
    "length": {"output_token_logprobs_length": 77},
}


def lie_in(engine: AbortingEngine, attempt: int, meta: dict[str, Any] | None) -> None:
    """Let the attempt with this number, from 1, say ``meta``; None: it has another text."""

    def edit(output: dict[str, Any], _is_last: bool) -> None:
        if len(engine.asked) == attempt and meta is None:
            output["text"] = output["text"].upper()
        elif len(engine.asked) == attempt:
            output["meta_info"] |= meta

    engine.edit = edit


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """The number of tokens of each recorded answer, and the reason to doubt it that was known beforehand."""
    found: list[tuple[int, str | None]] = []
    record = Turns.record

    def spy(turns: Turns, turn: Any, answer: Any, doubt: str | None = None, **more: Any) -> Any:
        found.append((len(answer["output_ids"]), doubt))
        return record(turns, turn, answer, doubt, **more)

    monkeypatch.setattr(Turns, "record", spy)
    return found


def text_of(told: list[dict[str, Any]], mode: str) -> str:
    if "choices" not in told[0]:
        return "".join(event["text"] for event in (told if mode == "incremental" else told[-1:]))
    choices = [choice for event in told for choice in event["choices"]]
    pieces = [choice["message"] if "message" in choice else choice["delta"] for choice in choices]
    return "".join(piece.get("content") or "" for piece in pieces)


@pytest.mark.parametrize(
    ("path", "mode", "liar"),
    [
        ("/generate", "cumulative", 2),
        ("/generate", "incremental", 2),
        ("/generate", "whole", 2),
        ("/generate", "incremental", 3),
        ("/v1/chat/completions", "cumulative", 2),
    ],
)
async def test_a_lie_of_one_attempt_makes_the_joined_answer_doubtful(
    start: Start, tmp_path: Path, recorded: list[tuple[int, str | None]], path: str, mode: str, liar: int
) -> None:
    engine = engine_of("running", mode)
    body: dict[str, Any] = {"rid": "r"} | (
        {"text": PROMPT} if path == "/generate" else {"messages": MESSAGES}
    )
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        for lie in (*LIES, "text"):
            begin_again(engine, 2, 4)
            recorded.clear()
            lie_in(engine, liar, LIES.get(lie))
            told = (
                [await answer_of(running, path, **body)]
                if mode == "whole"
                else await events_of(running, path, **body)
            )
            assert text_of(told, mode) == ALL, lie
            assert len(engine.asked) == 3, lie
            assert recorded[-1] == (len(TAPE), DOUBT), lie
            assert {doubt for size, doubt in recorded if size <= 2} == {None}, lie
            assert {doubt for size, doubt in recorded if size == 4} == ({None} if liar == 3 else {DOUBT}), lie


@pytest.mark.parametrize("mode", ["cumulative", "incremental", "whole"])
async def test_a_lie_of_the_first_attempt_makes_the_joined_answer_doubtful(
    start: Start, tmp_path: Path, recorded: list[tuple[int, str | None]], mode: str
) -> None:
    engine = engine_of("running", mode)
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        for lie in (*LIES, "text"):
            begin_again(engine, 2)
            recorded.clear()
            lie_in(engine, 1, LIES.get(lie))
            if mode == "whole":
                await answer_of(running, "/generate", text=PROMPT, rid="r")
            else:
                await events_of(running, "/generate", text=PROMPT, rid="r")
            assert recorded[-1] == (len(TAPE), DOUBT), lie


@pytest.mark.parametrize(
    ("lie", "mode"), [("name", "incremental"), ("name", "cumulative"), ("text", "cumulative")]
)
async def test_attempt_that_takes_tokens_back_makes_merged_answer_inexact(
    start: Start,
    tmp_path: Path,
    recorded: list[tuple[int, str | None]],
    lie: str,
    mode: str,
) -> None:
    """Only the first event of the second attempt lies: all later ones are an answer without a fault."""
    engine = engine_of("running", mode, 2)

    def edit(event: dict[str, Any], _is_last: bool) -> None:
        if (len(engine.asked), event["meta_info"]["completion_tokens"]) == (2, 1):
            if lie == "name":
                event["meta_info"]["id"] = "of another one"
            else:
                event["text"] = "no"

    engine.edit = edit
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        await events_of(running, "/generate", text=PROMPT, rid="r")
    assert recorded[-1] == (len(TAPE), DOUBT)


@pytest.mark.parametrize("mode", ["cumulative", "incremental", "whole"])
async def test_an_attempt_without_logprobs_leaves_none_to_the_others(
    start: Start, tmp_path: Path, recorded: list[tuple[int, str | None]], mode: str
) -> None:
    """They would be those of other tokens."""
    engine = engine_of("running", mode, 2)
    lie_in(engine, 1, {"output_token_logprobs": None, "output_token_logprobs_length": None})
    async with aborting(start, tmp_path, engine, "--resume-aborted") as running:
        if mode == "whole":
            told = await answer_of(running, "/generate", text=PROMPT, session_id="s")
        else:
            told = (await events_of(running, "/generate", text=PROMPT))[-1]
        document = (await running.client.get("/trajectories/s")).json()
    assert "output_token_logprobs" not in told["meta_info"]
    assert recorded[-1] == (len(TAPE), None)
    [record] = document["trajectories"]
    assert (record["inexact_reason"], record["rollout_logp"][-len(TAPE) :]) == (
        "no_logprobs",
        [None] * len(TAPE),
    )
