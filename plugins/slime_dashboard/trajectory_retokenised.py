"""Comparison of recorded tokens with the tokens that the tokenizer makes of their text."""

from __future__ import annotations

import codecs
import unicodedata
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slime_dashboard.trajectory_pieces import Piece

__all__ = ["Comparison", "Place", "compared"]

#: A decoder writes this for bytes that are no (whole) character.
_BROKEN = "\ufffd"
#: Number of tokens, or of boundaries, in one step. A step takes 0.3 ms, or a few ms if no piece is cached yet.
_STEP = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Recorded tokens ``start`` to ``end``, and the tokens ``again`` that the tokenizer makes of the same text."""

    start: int
    end: int
    again: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The places that differ, in order. ``changed``: the number of recorded tokens in them.

    ``again``: the number of tokens that the tokenizer makes of the whole text.
    """

    places: tuple[Place, ...]
    changed: int
    again: int


def compared(
    recorded: Sequence[int], again: Sequence[int], piece: Callable[[int], Piece]
) -> Generator[None, None, Comparison | None]:
    """Compare two sequences of tokens of one text, in steps for :meth:`FairTurns.run`. O(tokens).

    Both sequences are cut wherever both have a token boundary after the same number of characters. The tokens between
    two neighbouring cuts make a place, unless both sequences have the same tokens there. Returns None if the bytes of a
    token are not known, or if the two texts have different numbers of characters.
    """
    left = yield from _boundaries(recorded, piece)
    right = yield from _boundaries(again, piece)
    if left is None or right is None or left.characters != right.characters:
        return None
    places: list[Place] = []
    # start and first: the numbers of recorded and of new tokens before the last cut; i and j: the indexes of the next
    # boundaries
    start = first = i = j = 0
    rounds = 0
    while i < len(left.tokens) and j < len(right.tokens):
        mine, its = left.before[i], right.before[j]
        end, last = left.tokens[i], right.tokens[j]
        # Broken bytes count as no characters. If the new tokens go on with broken bytes after the last recorded token,
        # these tokens belong to the last place.
        if mine == its and (end < len(recorded) or last == len(again)):
            places += _differing(recorded, again, (start, end), (first, last))
            start, first = end, last
        i, j = i + (mine <= its), j + (its <= mine)
        rounds += 1
        if not rounds % _STEP:
            yield
    places += _differing(recorded, again, (start, len(recorded)), (first, len(again)))
    return Comparison(tuple(places), sum(place.end - place.start for place in places), len(again))


def _differing(
    recorded: Sequence[int], again: Sequence[int], mine: tuple[int, int], its: tuple[int, int]
) -> list[Place]:
    """Return a list with the place that two ranges make, without equal tokens at its ends; empty for equal ranges.

    If the tokenizer only adds tokens, the place also has the recorded token before the added ones, so that the page can
    frame this token. If the range of recorded tokens is empty, the place has no recorded token.
    """
    (start, end), (first, last) = mine, its
    if [*recorded[start:end]] == [*again[first:last]]:
        return []
    while start < end and first < last and recorded[start] == again[first]:
        start, first = start + 1, first + 1
    if start == end > mine[0]:
        start, first = start - 1, first - 1
    while end - start > 1 and first < last and recorded[end - 1] == again[last - 1]:
        end, last = end - 1, last - 1
    return [Place(start, end, tuple(again[first:last]))]


class _Boundaries(NamedTuple):
    """The token boundaries at which a character ends. ``characters``: the number of all characters.

    ``tokens`` and ``before``: the number of tokens and the number of characters before each boundary.
    """

    # arrays: the garbage collector would traverse a list of tuples, and stop the process meanwhile
    tokens: array[int]
    before: array[int]
    characters: int


def _boundaries(
    ids: Sequence[int], piece: Callable[[int], Piece]
) -> Generator[None, None, _Boundaries | None]:
    """Return the boundaries of tokens between characters; None if the bytes of a token are not known.

    Characters are counted in decomposed form (NFD), since a tokenizer may compose them. Replacement characters are not
    counted: some tokenizers write one for each broken byte, others one for several.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens, before = array("q"), array("q")
    characters = last = 0
    for place, token in enumerate(ids, 1):
        raw = piece(token).raw
        if raw is None:
            return None
        characters += _length(decoder.decode(raw, place == len(ids)))
        if characters > last and not decoder.getstate()[0]:
            tokens.append(place)
            before.append(characters)
            last = characters
        if not place % _STEP:
            yield
    return _Boundaries(tokens, before, characters)


def _length(text: str) -> int:
    if text.isascii():
        return len(text)
    return len(unicodedata.normalize("NFD", text.replace(_BROKEN, "")))
