"""Tokens matched with the text that they spell, by decoding and comparing: no tokenizer needs a special case.

Decoding is a prefix sum: the text of ``ids[:k]`` grows with ``k``. A cut that is found by that rule is compared with
the text before it is believed. A tokenizer that breaks the rule yields no cut, never a wrong one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from router_core.types import Tokenizer
from slime_radix_cache.tokens.backend import Decoder, decoder_of

__all__ = ["Spelling"]

#: A decoder writes this for bytes that are no (whole) character; a place behind it is no boundary.
_BROKEN = "\ufffd"
_BYTES_OF_CHARACTER = 4
#: Tokens to step back from the halving's answer; a character is spread over at most four.
_STEPS_BACK = 8
#: Tokens whose own text is kept: each answer's last one is asked for, and often it is the same.
_TOKENS = 1 << 12
#: Tokens of the longest stop string that is looked for behind half a character.
_LONGEST_TRIMMED = 64


class Spelling:
    """Compares the tokens of responses with the texts that engines gave for them.

    ``lead``: see Abilities. With one, tokens may be read in two ways. SGLang reads them as the beginning of a text
    behind special tokens only, and else as tokens behind others.
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
        """``(visible, tail)`` of a response that reads ``text``: see Sampled. None when ``ids`` do not spell it.

        A text may lack no more than its finish ``reason`` explains: a trimmed stop token or stop string, or the end
        that an engine withholds before it has a reason, or when it aborts. Two decodings in the usual case.
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
        """True when ``reason`` says why ``text`` may lack what the last of ``ids`` say."""
        if reason is None:
            return True
        kind, matched = (
            (reason.get("type"), reason.get("matched")) if isinstance(reason, dict) else (None, None)
        )
        both = [(reading, skip) for reading in self._readings for skip in (True, False)]
        if kind == "stop" and isinstance(matched, int):
            return ids[-1] == matched and text in (reading.text(ids[:-1], skip) for reading, skip in both)
        if kind == "stop" and isinstance(matched, str) and matched:
            # The text may end in half a character, which whole tokens show as another one.
            start = max(0, len(text) - 1)
            end = len(text) + len(matched)
            return any(reading.text(ids, skip).find(matched, start, end) >= 0 for reading, skip in both)
        return bool(kind == "abort")

    def _ends_early(self, reading: _Reading, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        visible, covered = self._cut(ids, text.encode(), (reading,))
        if covered == len(text.encode()):
            return visible, reading.behind(ids, visible)
        return reading.broken_off(ids, text) or reading.inside_token(ids, text)

    def text_of(self, ids: Sequence[int]) -> str:
        """All that ``ids`` say, special tokens spelt out: the key of a prompt that was given as ids."""
        return self._plain.text(ids, False)


class _Reading:
    """One way to read tokens: behind those of ``lead``."""

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
        """The fewest of the leading ``ids`` that spell the longest prefix of ``wanted``, and that prefix."""
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
                    length -= 1  # a token that shows nothing belongs to what comes after
                return length, spelt
        return 0, ""

    def _whole(self, ids: Sequence[int], length: int, skip_special: bool) -> str:
        """The text of ``length`` tokens, and of those that complete its last character.

        Broken characters may be longer than whole ones: SentencePiece writes one for each byte.
        """
        spelt = self.text(ids[:length], skip_special)
        for more in range(length + 1, min(length + _BYTES_OF_CHARACTER, len(ids) + 1)):
            if not spelt.endswith(_BROKEN):
                break
            spelt = self.text(ids[:more], skip_special)
        return spelt

    def behind(self, ids: Sequence[int], visible: int) -> str:
        """Return the text of the tokens after the ``visible`` ones, if a client could write it."""
        if not self._lead:
            return _anchored(self._decode(ids[visible:], False))
        whole, shown = self.text(ids, False), self.text(ids[:visible], False)
        return _anchored(whole[len(shown) :]) if whole.startswith(shown) else ""

    def broken_off(self, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        """A text that ends in half a character, before a stop token or string that was trimmed."""
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
        for longer in (self.text(ids, False), self.text(ids, True)):
            if longer.startswith(text):
                return -1, _anchored(longer[len(text) :])
        return None

    def without_hidden(self, ids: Sequence[int], shown: str) -> int:
        visible = len(ids)
        while visible:
            if ids[visible - 1] not in self._special:
                if self._decode(ids[visible - 1 : visible], True):
                    break
                if self.text(ids[: visible - 1], True) != shown:
                    break  # alone it shows nothing, behind others it does: SentencePiece's space
            visible -= 1
        return visible


def _anchored(tail: str) -> str:
    """``tail`` if a client could write it; broken characters are no text to continue from."""
    return "" if _BROKEN in tail else tail
