"""Matching of tokens with the text that they spell, by decoding: no tokenizer needs a special case.

A *cut* is the place among tokens up to which they spell the longest possible beginning of a given text. The text of
``ids[:k]`` grows with ``k``, so a binary search finds the cut. Then the text of the tokens before the cut is compared
with the given text. If the text of some ids does not grow, the search may find no cut, but never a wrong cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from router_core.types import Tokenizer
from slime_radix_cache.tokens.decoding import Decoder, decoder_of

__all__ = ["Spelling"]

#: A decoder writes this for bytes that are no (whole) character; there is never a cut right after it.
_BROKEN = "\ufffd"
_BYTES_OF_CHARACTER = 4
#: How many places are tried for a cut, from the result of the binary search backwards. A character has at most four
#: tokens.
_STEPS_BACK = 8
#: How many tokens have their text cached. The last token of each answer is decoded alone, and is often the same.
_TOKENS = 1 << 12
#: If a text ends in half a character, the tokens after that place may be a trimmed stop string. The stop string is
#: found only if it has fewer tokens than this.
_LONGEST_TRIMMED = 64


class Spelling:
    """Comparison of the tokens of responses with the texts that engines gave for them.

    ``lead``: see Abilities. With a lead, tokens have two readings: as the beginning of a text, or as tokens that
    follow others. SGLang reads tokens as the beginning of a text only after special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, lead: Sequence[int] = ()) -> None:
        decoder = decoder_of(tokenizer)
        self._plain = _Reading(decoder)
        self._readings = (_Reading(decoder, lead), self._plain) if lead else (self._plain,)

    def cut(self, ids: bytes, text: bytes) -> tuple[int, int]:
        """See :data:`slime_radix_cache.index.text_search.Cut`. O(log tokens) decodings."""
        return self._cut(array("i", ids), text, self._readings)

    def _cut(self, ids: Sequence[int], text: bytes, readings: Iterable[_Reading]) -> tuple[int, int]:
        wanted = text.decode("utf-8", "ignore")  # the end may lie inside a character
        best = 0, 0
        for reading in readings:
            for skip_special in (True, False):
                length, spelt = reading.prefix(ids, wanted, skip_special)
                if len(self._readings) > 1 and not spelt.strip(" "):
                    continue  # spaces alone do not tell which reading is right
                covered = len(spelt.encode())
                if covered > best[1]:
                    best = length, covered
                if covered == len(text):
                    return best
        return best

    def tail(self, ids: Sequence[int], text: str, reason: Any = None) -> tuple[int, str] | None:
        """Return ``(visible, tail)`` of a response, see Sampled. Return None if its ``ids`` do not spell its ``text``.

        Besides special tokens, the text may lack only what the finish ``reason`` of the response explains: a trimmed
        stop token or stop string, or an end that the engine withholds. An engine withholds an end while the response is
        unfinished, or when it is aborted. Costs two decodings in the usual case.
        """
        for reading in self._readings:
            if (shown := reading.text(ids, True)) == text:
                visible = reading.without_hidden(ids, shown)
                return visible, reading.behind(ids, visible)
            if reading.text(ids, False) == text:
                return len(ids), ""
        if not self._explains(reason, ids, text):
            return None
        for reading in self._readings:
            found = self._ends_early(reading, ids, text)
            if found is not None:
                return found
        return None

    def _explains(self, reason: Any, ids: Sequence[int], text: str) -> bool:
        """Return True if ``reason`` explains why ``text`` may lack the text of the last ``ids``."""
        if reason is None:
            return True
        kind, matched = (
            (reason.get("type"), reason.get("matched")) if isinstance(reason, dict) else (None, None)
        )
        both = [(reading, skip) for reading in self._readings for skip in (True, False)]
        if kind == "stop" and isinstance(matched, int):
            return ids[-1] == matched and text in (reading.text(ids[:-1], skip) for reading, skip in both)
        if kind == "stop" and isinstance(matched, str) and matched:
            # If the text ends in half a character, the text of all tokens has the whole character there.
            start = max(0, len(text) - 1)
            end = len(text) + len(matched)
            return any(reading.text(ids, skip).find(matched, start, end) >= 0 for reading, skip in both)
        return bool(kind == "abort")

    def _ends_early(self, reading: _Reading, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        visible, covered = self._cut(ids, text.encode(), (reading,))
        if covered == len(text.encode()):
            return visible, reading.behind(ids, visible)
        return reading.broken_off(ids, text) or reading.inside_token(ids, text)

    def is_decoding(self, ids: Sequence[int], text: str) -> bool:
        """Return True if ``ids``, special tokens included, decode to ``text`` whatever tokens are before and after."""
        return len(self._readings) == 1 and _BROKEN not in text and self._plain.text(ids, False) == text

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included. It is the key of a prompt that was given as ids."""
        return self._plain.text(ids, False)


class _Reading:
    """One way to decode tokens: as if they followed the tokens ``lead``."""

    def __init__(self, decoder: Decoder, lead: Sequence[int] = ()) -> None:
        self._decoded, self._special = decoder
        self._decoded_one = lru_cache(_TOKENS)(lambda token, skip: decoder.decode([token], skip))
        self._lead = list(lead)
        self._before = len(self._decode(self._lead, False))

    def text(self, ids: Sequence[int], skip_special: bool) -> str:
        if not self._lead:
            return self._decode(ids, skip_special)
        return self._decode([*self._lead, *ids], skip_special)[self._before :]

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        if len(ids) == 1:
            return self._decoded_one(ids[0], skip_special)
        return self._decoded(ids, skip_special) if ids else ""

    def prefix(self, ids: Sequence[int], wanted: str, skip_special: bool) -> tuple[int, str]:
        """Return the number of ``ids`` before the cut for ``wanted``, and the beginning of ``wanted`` that they spell.

        If several numbers of ids spell that beginning, the smallest is returned.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._whole(ids, middle, skip_special)) <= len(wanted):
                low = middle
            else:
                high = middle - 1
        for length in range(low, max(low - _STEPS_BACK, 0), -1):
            spelt = self.text(ids[:length], skip_special)
            if spelt and not spelt.endswith(_BROKEN) and wanted.startswith(spelt):
                while self.text(ids[: length - 1], skip_special) == spelt:
                    length -= 1  # a token without text belongs to the part after the cut
                return length, spelt
        return 0, ""

    def _whole(self, ids: Sequence[int], length: int, skip_special: bool) -> str:
        """Return the text of ``length`` tokens, and of the tokens that complete its last character.

        Without the latter tokens, the text may be longer than with them: SentencePiece writes ``_BROKEN`` for each byte
        of an incomplete character.
        """
        spelt = self.text(ids[:length], skip_special)
        for more in range(length + 1, min(length + _BYTES_OF_CHARACTER, len(ids) + 1)):
            if not spelt.endswith(_BROKEN):
                break
            spelt = self.text(ids[:more], skip_special)
        return spelt

    def behind(self, ids: Sequence[int], visible: int) -> str:
        """Return the text of the tokens after the first ``visible`` ones; empty if no client could write that text."""
        if not self._lead:
            return _anchored(self._decode(ids[visible:], False))
        whole, shown = self.text(ids, False), self.text(ids[:visible], False)
        return _anchored(whole[len(shown) :]) if whole.startswith(shown) else ""

    def broken_off(self, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        """Match a ``text`` that ends in half a character because the engine left out the tokens after it. See tail."""
        if not text.endswith(_BROKEN):
            return None
        for visible in range(len(ids) - 1, max(len(ids) - _LONGEST_TRIMMED, 0), -1):
            if self.text(ids[:visible], True) == text:
                visible = self.without_hidden(ids[:visible], text)
            elif self.text(ids[:visible], False) != text:
                continue
            return visible, self.behind(ids, visible)
        return None

    def inside_token(self, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        """Match a ``text`` that ends inside a token. See Spelling.tail."""
        for longer in (self.text(ids, False), self.text(ids, True)):
            if longer.startswith(text):
                return -1, _anchored(longer[len(text) :])
        return None

    def without_hidden(self, ids: Sequence[int], shown: str) -> int:
        """Return the number of ``ids`` without the last ones that add nothing to ``shown``, the text of all ids."""
        visible = len(ids)
        while visible:
            if ids[visible - 1] not in self._special:
                if self._decode(ids[visible - 1 : visible], True):
                    break
                if self.text(ids[: visible - 1], True) != shown:
                    break  # the token has text only after other tokens: SentencePiece's space
            visible -= 1
        return visible


def _anchored(tail: str) -> str:
    """Return ``tail``; empty if it has broken characters, since no client writes a part of a character."""
    return "" if _BROKEN in tail else tail
