"""A response in several goes reads, and is told, as if it had been sampled in one."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from aborting_engine import AbortingEngine, logprob_of
from radix_cache.scripted import bits
from resume.continued import MODES, told

if TYPE_CHECKING:
    from routers import Start
    from slime_engine.tokenizer import EngineTokenizer

pytestmark = pytest.mark.anyio

SAID = (
    "the harbour wakes. ",
    "日本語です",
    "😀👩‍👩‍👧",
    "</search>",
    "<think>",
    "é ",
    "\n\n",
    "ends</sea",
    "aaab",
)


def tape_of(tokenizer: EngineTokenizer, luck: random.Random) -> list[int]:
    """Words, characters of many bytes, half characters and special tokens, most of them not spelt as usual."""
    tape: list[int] = []
    while len(tape) < 40:
        said = luck.choice(SAID)
        if luck.random() < 0.5:
            tape += tokenizer.encode(said)
        else:
            for part in said.encode():
                tape += [tokenizer.token_bytes.index(bytes([part]))]
        if luck.random() < 0.1:
            tape.append(luck.randrange(len(tokenizer.token_bytes)))
    return tape


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
async def test_no_seam_shows(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, mode: str, seed: int
) -> None:
    luck = random.Random(seed)
    tape = tape_of(tokenizer, luck)
    cuts = sorted(luck.sample(range(38), 4))
    parameters: dict[str, Any] = {
        "max_new_tokens": luck.choice([38, len(tape)]),
        "stop": luck.choice([None, ["</search>"], "aab", ["s. t", "です😀", "</search>"]]),
        "no_stop_trim": luck.random() < 0.3,
        "skip_special_tokens": luck.random() < 0.7,
        "ignore_eos": luck.random() < 0.3,
    }
    engine = AbortingEngine(tokenizer, tape, cuts, incremental=mode == "incremental")
    ids, text, reason = engine.uninterrupted(**parameters)
    events = await told(start, engine, checkpoint, mode, **parameters)
    last = events[-1]
    pieces = [event["text"] for event in events]
    if mode == "incremental":
        assert "".join(pieces) == text
        assert [one for event in events for one in event["output_ids"]] == ids
    else:
        assert last["text"] == text
        assert last["output_ids"] == ids
        assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))
    assert [event["meta_info"]["finish_reason"] for event in events] == [None] * (len(events) - 1) + [reason]
    triples = (
        [one for event in events for one in event["meta_info"]["output_token_logprobs"]]
        if mode == "incremental"
        else last["meta_info"]["output_token_logprobs"]
    )
    assert [token for _, token, _ in triples] == ids
    assert bits([value for value, _, _ in triples]) == bits([logprob_of(place) for place in range(len(ids))])
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    assert {event["meta_info"]["prompt_tokens"] for event in events} == {len(engine.consumed[0])}
    if len(ids) > cuts[0]:
        versions = [str(1 + sum(cut <= place for cut in cuts)) for place in range(len(ids))]
        spans = last["meta_info"]["weight_versions"]
        assert [one["version"] for one in spans for _ in range(one["start"], one["end"])] == versions
        assert engine.asked[1]["sampling_params"]["max_new_tokens"] == parameters["max_new_tokens"] - cuts[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trims", [True, False], ids=["trimmed", "shown"])
async def test_a_stop_string_is_seen_wherever_it_was_cut(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, trims: bool, mode: str
) -> None:
    before, stop = tokenizer.encode("the town"), tokenizer.encode_plain("</search>")
    tape = [*before, *stop, 300, 301, 302]
    parameters = {"stop": ["never", "</search>"], "no_stop_trim": not trims}
    for cut in range(len(before) + 1, len(before) + len(stop)):
        engine = AbortingEngine(tokenizer, tape, [cut], incremental=mode == "incremental")
        events = await told(start, engine, checkpoint, mode, **parameters)
        text = "".join(event["text"] for event in events) if mode == "incremental" else events[-1]["text"]
        assert text == ("the town" if trims else "the town</search>")
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "</search>"}
        assert events[-1]["meta_info"]["completion_tokens"] == len(before) + len(stop)
        assert len(engine.asked) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_broken_character_before_the_cut_is_told_once(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, mode: str
) -> None:
    """No byte of a character begins with 0x97, so the engine tells U+FFFD for it at once."""
    broken, tea = tokenizer.token_bytes.index(b"\x97"), tokenizer.encode_plain("茶")
    for begun in range(len(tea)):
        tape = [*tokenizer.encode("the town"), broken, *tea, *tokenizer.encode(" and the sea")]
        cut = tape.index(broken) + 1 + begun
        engine = AbortingEngine(tokenizer, tape, [cut], incremental=mode == "incremental")
        events = await told(start, engine, checkpoint, mode, max_new_tokens=len(tape))
        pieces = [event["text"] for event in events]
        assert ("".join(pieces) if mode == "incremental" else pieces[-1]) == "the town\ufffd茶 and the sea"
        if mode == "cumulative":
            assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))


@pytest.mark.parametrize("mode", MODES)
async def test_text_is_told_once_when_the_seam_decodes_from_inside_a_character(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, mode: str
) -> None:
    """The tokens decoded at a seam read as the end of the text before it, but for their first character."""
    broken, un = tokenizer.token_bytes.index(b"\x97"), tokenizer.encode(" un")
    cup = [tokenizer.token_bytes.index(bytes([one])) for one in "🍵".encode()]
    digits = tokenizer.encode("12345678901234")[: 14 - 2 * len(un)]
    near = [*cup[-1:], *un, *digits, broken, *un]  # the 16 tokens that are decoded
    tape = [*tokenizer.encode("the town"), *cup[:-1], *near, *tokenizer.encode(" and the sea")]
    cut = len(tape) - len(tokenizer.encode(" and the sea"))
    engine = AbortingEngine(tokenizer, tape, [cut], incremental=mode == "incremental")
    events = await told(start, engine, checkpoint, mode, max_new_tokens=len(tape))
    pieces = [event["text"] for event in events]
    text = "".join(pieces) if mode == "incremental" else pieces[-1]
    assert text == f"the town🍵 un{tokenizer.decode(digits)}\ufffd un and the sea"
