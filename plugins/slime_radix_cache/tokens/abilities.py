"""Abilities of a tokenizer, tested once when it is loaded.

Three properties of tokenizers would make answers silently wrong. Some lose text (lower-casing, collapsed spaces), so
the tokens do not lead back to the text. Some add a space before every text (SentencePiece), which is wrong for a text
that follows other tokens. And some decode a token differently at the beginning of a text.
Unicode's canonical composition (NFC, as in Qwen's tokenizers) and a space at the very beginning are no loss: the
record has the tokens that were sent, and its key is the text as the client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken

from slime_radix_cache.tokens.special_tokens import SpecialTokens, any_of

__all__ = ["LOSSY", "Abilities", "examine"]

#: The reason that answers give when the tokenizer is refused.
LOSSY = "lossy_tokenizer"

Encode = Callable[[str, bool], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

#: Texts that a lossy tokenizer changes: case, spaces, line ends, punctuation, scripts, compatibility forms.
_PROBES = (
    "Hello World",
    " a  b",
    "x\n\ny\t z ",
    "x\r\ny\rz\r\n",
    "isn't it , or . ?",
    "naïve Ångström x² ﬁ ①",
    "日本語 😀",
    "\ndef f(x):\n    return [x]",
)
#: Candidates for ``guards``, see Abilities: one of them before a text may keep the tokenizer from adding a space.
_GUARDS = ("\n", "☺", "\x01")
_BEFORE = "One"
#: Places at which texts may be cut: their pattern, and a pattern that any token across such a place matches. GPT-2
#: writes "\u0120" for a space and "\u010a" for a line feed; SentencePiece writes "\u2581" for a space.
_BREAKS = (
    (r"(?<=[A-Za-z])(?= [A-Za-z])", r"[A-Za-z][ \u0120\u2581]"),
    (r"(?<=[A-Za-z])(?=[0-9])", r"[A-Za-z][0-9]"),
    (r"(?<=\S\n)(?=[A-Za-z])", r"[\n\u010a][A-Za-z]"),
)
#: Texts before and after a break.
_AROUND_BREAK = (
    ("Hello", " World"), ("it's a  test", " of it"), ("x = (y", " z);"), ("Zz", " Aa"), ("don't", " Stop"), ("A", "1"),
    ("abc", "12345678.5"), ("0x3f", "77"), ("one,\n", "two"), ("a\n", "b"), (")\n", "Then"), ("\u65e5 x\n", "y"),
)  # fmt: skip
#: Maximum number of ids that a tokenizer may put before a text; most put none or one, GLM-4's puts two.
_MOST_BEFORE = 4


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of one tokenizer. ``refused``: why no answer can be exact with it; None if answers can be exact.

    - ``guards``: texts. One of them is put before a text that follows other tokens, and the ids of the guard are then
      removed. If the guard merged with the text into one token, the next guard is tried. () if no guard is needed.
    - ``lead``: ids to put before other ids, so that these are decoded as in the middle of a text; () if not needed.
    - ``seams``: finds places at which a text may be cut: the ids of the parts, joined, are those of the whole. None if
      the tokenizer has no such places.
    - ``breaks``: finds places at which a very long part may be cut. The ids of both pieces are those of the whole,
      if the second piece is tokenised as a text that follows other tokens. None if the tokenizer has no such places.
    - ``frame``: ids before and after a text with ``add_special_tokens``; None if they differ between texts.
    - ``special``: finds special tokens that a text spells, but only those that no other added token can overlap.
    """

    refused: str | None = None
    guards: tuple[str, ...] = ()
    lead: tuple[int, ...] = ()
    seams: re.Pattern[str] | None = None
    breaks: re.Pattern[str] | None = None
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    special: SpecialTokens = field(default_factory=SpecialTokens)


def examine(
    encode: Encode, decode: Decode, added: Sequence[AddedToken], vocabulary: Iterable[str] = ()
) -> Abilities:
    """Test a tokenizer. ``added``: the tokens for which the tokenizer searches first. Takes about 10 ms.

    ``vocabulary``: the tokens of the tokenizer's model; without them there are no ``breaks``.
    """

    def plain(text: str) -> list[int]:
        return list(encode(text, False))

    for probe in _PROBES:
        read = decode(plain(probe))
        if read.removeprefix(" ") != probe.removeprefix(" "):
            return Abilities(refused=f"it decodes the tokens of {probe!r} as {read!r}")
    guards = [guard for guard in ("", *_GUARDS) if _joins(plain, decode, guard)]
    if not guards:
        return Abilities(refused="it adds a space to a text that follows other tokens")
    before = plain(_BEFORE)
    size = len(plain(guards[0]))
    alike = all(
        decode([*before, *rest]) == decode(before) + decode(rest)
        for rest in (plain(guards[0] + probe)[size:] for probe in _PROBES)
    )
    return Abilities(
        guards=() if guards[0] == "" else tuple(guards),
        lead=() if alike else tuple(before),
        seams=_pattern([text for text in _seams(added) if _is_seam(plain, text)]),
        breaks=_breaks(plain, guards[0], added, vocabulary),
        frame=_frame(encode),
        special=SpecialTokens([text for text in _special(added) if len(plain(text)) == 1]),
    )


def _joins(plain: Callable[[str], list[int]], decode: Decode, guard: str) -> bool:
    """Return True if ``guard`` works.

    For each probe, the ids after the guard's ids must decode to exactly the probe when they follow other tokens.
    """
    ahead, before = plain(guard), plain(_BEFORE)
    for probe in _PROBES:
        ids = plain(guard + probe)
        if ids[: len(ahead)] != ahead or decode([*before, *ids[len(ahead) :]]) != decode(before) + probe:
            return False
    return True


def _frame(encode: Encode) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    frames = set()
    for probe in _PROBES:
        inner, whole = list(encode(probe, False)), list(encode(probe, True))
        places = range(min(_MOST_BEFORE, len(whole) - len(inner)) + 1)
        place = next((place for place in places if whole[place : place + len(inner)] == inner), None)
        if place is None:
            return None
        frames.add((tuple(whole[:place]), tuple(whole[place + len(inner) :])))
    return frames.pop() if len(frames) == 1 else None


def _seams(added: Sequence[AddedToken]) -> list[str]:
    """Return tokens at whose beginning the tokenizer itself cuts a text, whatever stands before and after the token.

    ``tokenizers`` first searches for tokens that are not normalised, leftmost and longest, and encodes each text
    between them separately (tokenizers, src/tokenizer/added_vocabulary.rs). Excluded are tokens that depend on the
    text before them or strip it, and tokens that may begin inside another token.
    """
    first = [token for token in added if not token.normalized and token.content]
    bad = {token.content for token in first if token.lstrip or token.single_word}
    apart = _apart([token.content for token in first])
    return [text for text in apart if not any(one.startswith(text) for one in bad)]


def _special(added: Sequence[AddedToken]) -> list[str]:
    """Return added tokens that are one token wherever a text spells them. Runs of spaces and the like are excluded."""
    return _apart([token.content for token in added if token.content and not token.single_word])


def _apart(texts: Sequence[str]) -> list[str]:
    """Return those of ``texts`` that cannot begin at the second or a later character of any of ``texts``."""
    endings = {text[place:] for text in texts for place in range(1, len(text))}
    inside = {ending[:size] for ending in endings for size in range(1, len(ending) + 1)}
    return [
        text
        for text in texts
        if text not in inside and not any(text[:size] in endings for size in range(1, len(text) + 1))
    ]


def _is_seam(plain: Callable[[str], list[int]], text: str) -> bool:
    return all(
        plain(before + text + behind) == plain(before) + plain(text + behind)
        for before, behind in (("Hello World ", " a  b"), ("x\n\n", "lower\n"), ("é", "日本"))
    )


def _breaks(
    plain: Callable[[str], list[int]], guard: str, added: Sequence[AddedToken], vocabulary: Iterable[str]
) -> re.Pattern[str] | None:
    """Return a pattern of places that no token spans, or None.

    Where no token of the vocabulary spans such a place, the tokenizer's model tokenises both sides independently. But
    the step before the model, which splits a text into words, may look one character ahead. So the places are tested.
    """
    texts = [token.content for token in added]
    words = "\0".join(set(vocabulary).difference(texts))
    if not words:
        return None
    ahead = plain(guard)

    def is_safe(pattern: str) -> bool:
        for before, behind in _AROUND_BREAK:
            if re.compile(pattern).search(before + behind, len(before), len(before) + 1) is None:
                continue
            ids = plain(guard + behind)
            if ids[: len(ahead)] != ahead or plain(before + behind) != plain(before) + ids[len(ahead) :]:
                return False
        return True

    found = [
        pattern
        for pattern, across in _BREAKS
        if not re.search(across, words)
        and not any(re.search(pattern, text) for text in texts)
        and is_safe(pattern)
    ]
    return re.compile("|".join(found)) if found else None


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile(any_of(sorted(set(texts)))) if texts else None  # only the start of a match is used
