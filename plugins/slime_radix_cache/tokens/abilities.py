"""Abilities of a tokenizer: found out once, when it is loaded, by trying it.

Three habits of tokenizers would make answers silently wrong. Some lose text (lower-casing, collapsed spaces): two
texts have the same tokens, so no text leads back to them. Some put a space of their own before every text
(SentencePiece), which is wrong for a text that goes on from other tokens. And some read a token differently at the
beginning of a text than behind others. Unicode's canonical composition (NFC, as Qwen's have it) and a space at the
very beginning are no loss. The tokens that were sent are recorded, and their key is the text as the client wrote it.
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

#: Texts that a lossy tokenizer changes: case, spaces, line ends, spaces before signs, scripts, compatibility forms.
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
#: Put before a text, each keeps the tokenizer from adding a space, and is taken off again.
_GUARDS = ("\n", "☺", "\x01")
_BEFORE = "One"
#: Places at which texts may be cut: a pattern, and what a token would have to have in it to go across one. GPT-2's way
#: to write bytes has "\u0120" for a space and "\u010a" for a line feed, SentencePiece "\u2581".
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
#: Ids that a tokenizer puts before a text, at most: one in all that are known.
_MOST_BEFORE = 4


@dataclass(frozen=True, slots=True)
class Abilities:
    """``refused``: what the tokenizer does to text that forbids exact answers; None when it may be trusted.

    - ``guards``: one of them goes before a text that follows other tokens, its ids to be taken off if they are there
      (a text may merge with one); () where nothing is needed.
    - ``lead``: ids behind which others are to be decoded to be read as they are within a text; () if it is all one.
    - ``seams``: finds the places before which a text may be cut, so that the ids of the parts are those of the
      whole; None when there are none.
    - ``breaks``: finds places within a part that does not fit in memory many times over; the ids of what comes before
      and, as a text that follows others, of what comes behind are those of the whole. None when there are none.
    - ``frame``: ids before and behind a text with ``add_special_tokens``; None when they are not always the same.
    - ``special``: tokens that a text spells, inside of which nothing ends.
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
    """Try a tokenizer; ``added`` are the tokens that it looks for before anything else. Some 10 ms.

    ``vocabulary`` is that of its model; without one there are no ``breaks``.
    """

    def plain(text: str) -> list[int]:
        return list(encode(text, False))

    for probe in _PROBES:
        read = decode(plain(probe))
        if read.removeprefix(" ") != probe.removeprefix(" "):
            return Abilities(refused=f"it reads {read!r} back for {probe!r}")
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
    """True if the ids of a probe without those of the guard before it say the probe and nothing else."""
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
    """Tokens at whose beginning the tokenizer itself cuts a text, whatever stands around it.

    ``tokenizers`` looks for those that are not normalised first, leftmost and longest, and treats what lies between
    them alone (tokenizers, src/tokenizer/added_vocabulary.rs). Out are those that take what stands before them
    along or into account, and those that another one could overlap from the left.
    """
    first = [token for token in added if not token.normalized and token.content]
    bad = {token.content for token in first if token.lstrip or token.single_word}
    apart = _apart([token.content for token in first])
    return [text for text in apart if not any(one.startswith(text) for one in bad)]


def _special(added: Sequence[AddedToken]) -> list[str]:
    """Tokens that are one wherever a text spells them. Out are runs of spaces and the like: one more is another one."""
    return _apart([token.content for token in added if token.content and not token.single_word])


def _apart(texts: Sequence[str]) -> list[str]:
    """Those of ``texts`` that no other one could contain, or overlap from the left."""
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
    """Places that no token goes across.

    Whatever a model merges ends in one token, so both sides are tokenised as if they stood alone. The step before it,
    which cuts a text into words, looks at one sign ahead. That is tried.
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
    return re.compile(any_of(sorted(set(texts)))) if texts else None  # only where one begins matters
