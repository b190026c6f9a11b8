"""Text comes out piece by piece, and the pieces are the text."""

from __future__ import annotations

import random

import pytest

from slime_engine.detokenizer import IncrementalText
from slime_engine.model import NgramModel
from slime_engine.sampling import SamplingParams

LENGTH = {"type": "length", "length": 0}


def pieces(model: NgramModel, ids: list[int], params: SamplingParams, reason: dict[str, object]) -> list[str]:
    text = IncrementalText(model.tokenizer, params)
    return [text.add([one]) for one in ids[:-1]] + [text.finish(ids[-1:], reason)]


@pytest.mark.parametrize("skip", [False, True])
def test_pieces_of_any_tokens_join_to_the_tokenizers_own_text(model: NgramModel, skip: bool) -> None:
    dice = random.Random(3)
    for _ in range(500):
        ids = [dice.randrange(model.vocab_size) for _ in range(dice.randrange(1, 12))]
        got = pieces(model, ids, SamplingParams(skip_special_tokens=skip), LENGTH)
        assert "".join(got) == model.tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_split_over_tokens_appears_when_it_is_whole(model: NgramModel) -> None:
    by_bytes = {text: one for one, text in enumerate(model.tokenizer.token_bytes)}
    ids = [by_bytes[bytes([byte])] for byte in "é🙂月".encode()]
    got = pieces(model, ids, SamplingParams(), LENGTH)
    assert got == ["", "é", "", "", "", "🙂", "", "", "月"]


def test_a_character_cut_for_good_is_a_replacement_character(model: NgramModel) -> None:
    by_bytes = {text: one for one, text in enumerate(model.tokenizer.token_bytes)}
    ids = [by_bytes[bytes([byte])] for byte in "a🙂".encode()[:-1]]
    assert pieces(model, ids, SamplingParams(), LENGTH) == ["a", "", "", "\ufffd"]


def test_a_possible_stop_string_is_held_back_until_it_is_decided(model: NgramModel) -> None:
    by_bytes = {text: one for one, text in enumerate(model.tokenizer.token_bytes)}
    ids = [by_bytes[bytes([byte])] for byte in b"xababac"]
    params = SamplingParams(stop=("abac", "zz"))
    assert pieces(model, ids, params, LENGTH) == ["x", "", "", "", "ab", "", "abac"]
    assert pieces(model, ids, params, {"type": "stop", "matched": "abac"}) == ["x", "", "", "", "ab", "", ""]


def test_untrimmed_stops_are_shown(model: NgramModel) -> None:
    ids = model.tokenizer.encode("one STOP")
    params = SamplingParams(stop=("STOP",), no_stop_trim=True)
    assert "".join(pieces(model, ids, params, {"type": "stop", "matched": "STOP"})) == "one STOP"


def test_a_stop_token_is_left_out_even_if_special_tokens_are_shown(model: NgramModel) -> None:
    ids = model.tokenizer.encode("done<|im_end|>")
    reason: dict[str, object] = {"type": "stop", "matched": ids[-1]}
    assert "".join(pieces(model, ids, SamplingParams(skip_special_tokens=False), reason)) == "done"
    shown = SamplingParams(skip_special_tokens=False, no_stop_trim=True)
    assert "".join(pieces(model, ids, shown, reason)) == "done<|im_end|>"
