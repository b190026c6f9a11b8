"""Tokens matched with the text that they spell, with a real byte-level BPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_cache.toy import pack
from slime_engine.tokenizer import EngineTokenizer
from slime_radix_cache.tokens.spelling import Spelling

TEXT = "a garden ☔ is <think>日本語 😀</think> slow"


@pytest.fixture
def spelling(tokenizer: EngineTokenizer) -> Spelling:
    return Spelling(tokenizer)


def test_every_cut_keeps_whole_tokens_and_whole_characters(
    spelling: Spelling, tokenizer: EngineTokenizer
) -> None:
    ids = tokenizer.encode_plain(TEXT)
    ends = {tokenizer.decode(ids[:length]): length for length in range(len(ids), 0, -1)}
    for size in range(len(TEXT.encode()) + 1):
        text = TEXT.encode()[:size]
        whole = [spelt for spelt in ends if "\ufffd" not in spelt and text.startswith(spelt.encode())]
        best = max(whole, key=len, default="")
        assert spelling.cut(pack(*ids), text) == (ends.get(best, 0), len(best.encode()))


def test_a_token_that_shows_nothing_belongs_to_what_comes_after(
    spelling: Spelling, tokenizer: EngineTokenizer
) -> None:
    eos = tokenizer.encode("<|im_end|>")
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert spelling.cut(pack(*a, *eos, *b), b"a") == (1, 1)
    assert spelling.cut(pack(*a, *eos, *b), b"ab") == (3, 2)
    assert spelling.cut(pack(*a, *eos, *b), b"a<|im_end|>") == (2, 11)


@pytest.mark.parametrize(
    ("written", "text", "expected"),
    [
        ("a<|im_end|>", "a", (1, "<|im_end|>")),
        ("a<|im_end|>", "a<|im_end|>", (2, "")),
        ("a<|im_end|><|endoftext|>", "a", (1, "<|im_end|><|endoftext|>")),
        ("<|im_end|>", "", (0, "<|im_end|>")),
        ("a<|im_start|>b<|im_end|>", "ab", (3, "<|im_end|>")),
        ("a<|im_start|>b<|im_end|>", "a<|im_start|>b", (3, "<|im_end|>")),
        ("a</think>", "a", (1, "</think>")),
        ("a</think>", "a</th", (-1, "ink>")),
        ("a", "b", None),
        ("a", "ab", None),
    ],
)
def test_the_hidden_tail_is_found_by_comparing(
    spelling: Spelling, tokenizer: EngineTokenizer, written: str, text: str, expected: tuple[int, str] | None
) -> None:
    assert spelling.tail(tokenizer.encode(written), text) == expected


def test_half_a_character_is_no_text_to_continue_from(spelling: Spelling, tokenizer: EngineTokenizer) -> None:
    a, emoji, eos = (tokenizer.encode(text) for text in ("a", "😀", "<|im_end|>"))
    assert spelling.tail([*a, *emoji[:1]], "a") == (1, "")
    assert spelling.tail([*a, *emoji[:1]], "a\ufffd") == (2, "")
    assert spelling.tail([*a, *emoji[:1], *eos], "a\ufffd") == (2, "<|im_end|>")
    assert spelling.tail([*a, *emoji[:1], *a], "a\ufffd") == (2, "a")
    stop = [token for char in "</search>" for token in tokenizer.encode(char)]
    assert spelling.tail([*a, *emoji[:1], *stop], "a\ufffd") == (2, "</search>")
    assert spelling.tail([*a, *emoji[:1], *eos, *stop], "a\ufffd") == (2, "<|im_end|></search>")


class SpaceBefore:
    """Decodes as SentencePiece does: a word brings its space along, and the first one loses it."""

    words = ("", " ", " a")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.words[token] for token in token_ids).removeprefix(" ")


def test_a_token_that_shows_something_only_behind_others_is_not_hidden() -> None:
    assert Spelling(SpaceBefore()).tail([2, 1], "a ") == (2, "")
    assert Spelling(SpaceBefore()).tail([2, 1, 0], "a ") == (2, "")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 1279), min_size=1, max_size=12), data=st.data())
def test_no_tokens_at_all_are_ever_cut_wrongly(
    tokenizer: EngineTokenizer, ids: list[int], data: st.DataObject
) -> None:
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    text = shown[: data.draw(st.integers(0, len(shown)))]
    length, covered = Spelling(tokenizer).cut(pack(*ids), text.encode())
    spelt = [tokenizer.decode(ids[:length], skip_special_tokens=skip) for skip in (True, False)]
    assert text.encode()[:covered].decode() in spelt
    found = Spelling(tokenizer).tail(ids, shown)
    assert found is not None
    visible, _ = found
    assert visible >= 0
    assert tokenizer.decode(ids[:visible], skip_special_tokens=True) == shown


@pytest.mark.parametrize(
    ("ids", "text", "reason", "fits"),
    [
        ("harbour wakes", "harbour wakes", {"type": "length", "length": 2}, True),
        ("harbour wakes", "harbour", {"type": "length", "length": 2}, False),
        ("harbour wakes", "", {"type": "length", "length": 2}, False),
        ("harbour wakes", "harbour", {"type": "stop", "matched": " wakes"}, True),
        ("harbour wakes", "harbour", {"type": "stop", "matched": "tide"}, False),
        ("harbour wakes", "harb", {"type": "stop", "matched": " wakes"}, False),
        ("harbour<|im_end|>", "harbour", {"type": "stop", "matched": "EOS"}, True),
        ("harbour wakes<|im_end|>", "harbour", {"type": "stop", "matched": "EOS"}, False),
        ("harbour wakes", "harbour", {"type": "stop", "matched": "EOS"}, False),
        ("harbour wakes", "harbour", {"type": "abort"}, True),
        ("harbour wakes", "harbour", None, True),  # it goes on: a stop string may begin there
        ("harbour wakes", "tide", None, False),
    ],
)
def test_a_text_lacks_only_what_its_finish_reason_explains(
    spelling: Spelling, tokenizer: EngineTokenizer, ids: str, text: str, reason: Any, fits: bool
) -> None:
    if reason and reason.get("matched") == "EOS":
        reason = {**reason, "matched": tokenizer.encode("<|im_end|>")[0]}
    assert (spelling.tail(tokenizer.encode(ids), text, reason) is not None) is fits


def test_decoding_of_tokens_with_two_readings_depends_on_their_place(tokenizer: EngineTokenizer) -> None:
    ids = tokenizer.encode_plain(TEXT)
    assert Spelling(tokenizer).is_decoding(ids, TEXT)
    assert not Spelling(tokenizer, lead=tokenizer.encode_plain("One")).is_decoding(ids, TEXT)
