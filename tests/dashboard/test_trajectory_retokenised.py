"""Pieces of tokens, and comparison of token sequences of one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from slime_dashboard import trajectory_retokenised
from slime_dashboard.trajectory_pieces import Piece, Pieces
from slime_dashboard.trajectory_retokenised import Comparison, Place
from slime_engine.tokenizer import EngineTokenizer, corpus_documents, train_tokenizer

TOKENIZER = train_tokenizer(corpus_documents()[:40])


def pieces_of(tokenizer: EngineTokenizer) -> Pieces:
    return Pieces(tokenizer.decode, tokenizer)


PIECES = pieces_of(TOKENIZER)


class Written:
    """Tokens whose ids stand for given texts or bytes."""

    def __init__(self, *texts: str | bytes | None) -> None:
        self._texts = texts

    def __call__(self, token: int) -> Piece:
        text = self._texts[token]
        if text is None:
            return Piece(None, None)
        raw = text.encode() if isinstance(text, str) else text
        return Piece(text if isinstance(text, str) else None, raw)


def compared(
    recorded: Sequence[int], again: Sequence[int], piece: Callable[[int], Piece]
) -> Comparison | None:
    """Run all steps of the comparison."""
    found, _ = in_steps(recorded, again, piece)
    return found


def in_steps(
    recorded: Sequence[int], again: Sequence[int], piece: Callable[[int], Piece]
) -> tuple[Comparison | None, int]:
    """Run the comparison. Returns its result, and the number of its steps."""
    steps = trajectory_retokenised.compared(recorded, again, piece)
    number = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, number
        number += 1


def replaced(recorded: Sequence[int], places: Sequence[Place]) -> list[int]:
    made = list(recorded)
    for one in reversed(places):
        made[one.start : one.end] = one.again
    return made


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_replacing_all_places_gives_the_tokens_of_the_text(recorded: list[int]) -> None:
    again = TOKENIZER.encode(TOKENIZER.decode(recorded))
    found = compared(recorded, again, PIECES.of)
    assert found is not None
    assert replaced(recorded, found.places) == again
    assert (found.changed == 0) == (recorded == again)
    for place in found.places:
        old, new = recorded[place.start : place.end], list(place.again)
        assert old
        assert old != new
        if len(old) > 1:
            assert old[:1] != new[:1]
            assert old[-1:] != new[-1:]


def test_a_long_comparison_has_many_steps() -> None:
    """The event loop runs it, and other requests between its steps."""
    written = Written("a ", "th", "ink", "think")
    found, steps = in_steps([0, 1, 2] * 4000, [0, 3] * 4000, written)
    assert found is not None
    assert (len(found.places), found.changed) == (4000, 8000)
    assert steps > 20_000 / 256


def test_only_the_tokens_between_two_common_boundaries_differ() -> None:
    written = Written("a ", "th", "ink", "think", " b", "th", "e", "the")
    found = compared([0, 1, 2, 4, 5, 6], [0, 3, 4, 7], written)
    assert found is not None
    assert found.places == (Place(1, 3, (3,)), Place(4, 6, (7,)))
    assert (found.changed, found.again) == (4, 4)


def test_broken_bytes_at_the_end_belong_to_a_recorded_token() -> None:
    written = Written("a", b"b\xff", "b", b"\xef\xbf", b"\xbd")
    found = compared([0, 1], [0, 2, 3, 4], written)
    assert found is not None
    assert found.places == (Place(1, 2, (2, 3, 4)),)
    found = compared([0, 2, 3, 4], [0, 2], written)
    assert found is not None
    assert found.places == (Place(2, 4, ()),)


def test_a_character_of_several_tokens_is_one_place() -> None:
    written = Written("a", b"\xf0\x9f", b"\xa6\x80", "🦀", "b")
    found = compared([0, 1, 2, 4], [0, 3, 4], written)
    assert found is not None
    assert found.places == (Place(1, 3, (3,)),)


def test_bytes_that_are_no_character_differ_where_they_are() -> None:
    written = Written("a", b"\xf0\x9f", "b", "\ufffd")
    found = compared([0, 1, 2], [0, 3, 2], written)
    assert found is not None
    assert found.places == (Place(1, 2, (3,)),)


def test_added_tokens_are_a_place_with_the_token_beside_them() -> None:
    """A lone byte is written as U+FFFD, whose last byte may be that token."""
    written = Written("a", b"\xbd", "b", b"\xef", b"\xbf")
    found = compared([0, 1, 2], [0, 3, 4, 1, 2], written)
    assert found is not None
    assert found.places == (Place(1, 2, (3, 4, 1)),)
    assert found.changed == 1


def test_broken_characters_of_one_byte_each_do_not_shift_what_follows() -> None:
    written = Written("a", b"\xf0", b"\x9f", "\ufffd", " b", " c")
    found = compared([0, 1, 2, 4, 5], [0, 3, 3, 4, 5], written)
    assert found is not None
    assert found.places == (Place(1, 3, (3, 3)),)


def test_composed_characters_do_not_shift_what_follows() -> None:
    written = Written("caf", "e", "\u0301", "é", " x", " y")
    found = compared([0, 1, 2, 4, 5], [0, 3, 4, 5], written)
    assert found is not None
    assert found.places == (Place(1, 3, (3,)),)


def test_tokens_without_text_are_lost() -> None:
    written = Written("a", "", "b")
    found = compared([0, 1, 2, 1], [0, 2], written)
    assert found is not None
    assert replaced([0, 1, 2, 1], found.places) == [0, 2]
    assert found.changed == 2


@pytest.mark.parametrize(("recorded", "again"), [([0, 1], [0, 2]), ([0], [2])])
def test_unknown_bytes_and_other_texts_are_not_compared(recorded: list[int], again: list[int]) -> None:
    assert compared(recorded, again, Written("a", None, "b b")) is None


def test_pieces_join_to_the_text() -> None:
    for text in ("Hello, World 🦀\n\n 日本", "<|im_start|>user\n<think>"):
        found = [PIECES.of(token).raw or b"" for token in TOKENIZER.encode(text)]
        assert b"".join(found).decode() == text


class SentencePiece:
    """A tokenizer that leaves out the space of a first token, with byte fallback."""

    def __init__(self, *, rust: bool = True) -> None:
        words = ["<unk>", "\u2581Hello", "\u2581World", "<0xF0>", "<0x9F>", "\u2581One", "!"]
        own = tokenizers.Tokenizer(
            models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
        )
        own.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self._own = own
        if rust:
            self.backend_tokenizer: Any = own

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        assert text == "One"
        return [5]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._own.decode(ids, skip_special_tokens=False))


def test_a_token_has_its_own_space_wherever_it_stands() -> None:
    tokenizer = SentencePiece()
    assert tokenizer.decode([1]) == "Hello"
    pieces = Pieces(tokenizer.decode, tokenizer)
    assert [pieces.of(token) for token in (1, 2, 6)] == [
        Piece(" Hello", b" Hello"),
        Piece(" World", b" World"),
        Piece("!", b"!"),
    ]
    assert pieces.of(3) == Piece(None, b"\xf0")


def test_bytes_are_not_made_up() -> None:
    tokenizer = SentencePiece(rust=False)
    pieces = Pieces(tokenizer.decode, tokenizer)
    assert pieces.of(3) == Piece(None, None)
    assert pieces.of(1) == Piece(" Hello", b" Hello")


def test_the_vocabulary_is_not_written_out() -> None:
    own = SentencePiece()._own

    class Decoding(SentencePiece):
        """Its Rust tokenizer can tell its decoder and single tokens, no more."""

        def __init__(self) -> None:
            super().__init__(rust=False)
            self.backend_tokenizer = SimpleNamespace(decoder=own.decoder, id_to_token=own.id_to_token)

    tokenizer = Decoding()
    assert Pieces(tokenizer.decode, tokenizer).of(3) == Piece(None, b"\xf0")
