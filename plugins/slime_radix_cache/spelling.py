"""Which tokens spell which text: found by decoding and comparing, so that no tokenizer needs a special case.

Decoding is a prefix sum: the text of ``ids[:k]`` grows with ``k``. Whatever is found by that rule is compared
with the text before it is believed; a tokenizer that breaks the rule yields no cut, never a wrong one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from router_core.types import Tokenizer

__all__ = ["Spelling"]

#: What a decoder writes for bytes that are no (whole) character; a place behind it is no boundary.
_BROKEN = "\ufffd"
#: Tokens to step back from the halving's answer; a character is spread over at most four.
_STEPS_BACK = 8


class Spelling:
    """Compares the tokens of responses with the texts that engines gave for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # transformers' own decode costs twice as much, and does more only where it was told to tidy up spaces.
        tidies = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        rust: Tokenizer | None = None if tidies else getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = rust if rust is not None else tokenizer

    def cut(self, ids: bytes, text: bytes) -> tuple[int, int]:
        """See :data:`slime_radix_cache.matching.Cut`. O(log tokens) decodings."""
        wanted = text.decode("utf-8", "ignore")  # the end may lie inside a character
        tokens = array("i", ids)
        best = 0, 0
        for skip_special in (True, False):
            length, spelt = self._prefix(tokens, wanted, skip_special)
            covered = len(spelt.encode())
            if covered > best[1]:
                best = length, covered
            if covered == len(text):
                break
        return best

    def _prefix(self, ids: Sequence[int], wanted: str, skip_special: bool) -> tuple[int, str]:
        """The fewest of the leading ``ids`` that spell the longest prefix of ``wanted``, and that prefix."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._decode(ids[:middle], skip_special)) <= len(wanted):
                low = middle
            else:
                high = middle - 1
        for length in range(low, max(low - _STEPS_BACK, 0), -1):
            spelt = self._decode(ids[:length], skip_special)
            if spelt and not spelt.endswith(_BROKEN) and wanted.startswith(spelt):
                while self._decode(ids[: length - 1], skip_special) == spelt:
                    length -= 1  # a token that shows nothing belongs to what comes after
                return length, spelt
        return 0, ""

    def tail(self, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        """``(visible, tail)`` of a response that reads ``text``: see Sampled. None when ``ids`` do not spell it.

        Two decodings in the usual case.
        """
        shown = self._decode(ids, True)
        if shown == text:
            visible = self._without_hidden(ids, shown)
        elif (whole := self._decode(ids, False)) == text:
            return len(ids), ""
        else:
            visible, covered = self.cut(array("i", ids).tobytes(), text.encode())
            if covered < len(text.encode()):
                return self._broken_off(ids, text) or self._inside_token((whole, shown), text)
        return visible, _anchored(self._decode(ids[visible:], False))

    def _broken_off(self, ids: Sequence[int], text: str) -> tuple[int, str] | None:
        """A text that ends in half a character, before a stop token that was trimmed."""
        for visible in range(len(ids) - 1, max(len(ids) - _STEPS_BACK, 0), -1):
            if text in (self._decode(ids[:visible], True), self._decode(ids[:visible], False)):
                return visible, _anchored(self._decode(ids[visible:], False))
        return None

    @staticmethod
    def _inside_token(longer: Iterable[str], text: str) -> tuple[int, str] | None:
        for one in longer:
            if one.startswith(text):
                return -1, _anchored(one[len(text) :])
        return None

    def text_of(self, ids: Sequence[int]) -> str:
        """All that ``ids`` say, special tokens spelt out: the key of a prompt that was given as ids."""
        return self._decode(ids, False)

    def _without_hidden(self, ids: Sequence[int], shown: str) -> int:
        visible = len(ids)
        while visible and not self._decode(ids[visible - 1 : visible], True):
            if self._decode(ids[: visible - 1], True) != shown:
                break  # alone it shows nothing, behind others it does: SentencePiece's space
            visible -= 1
        return visible

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special) if ids else ""


def _anchored(tail: str) -> str:
    """``tail`` if a client could write it; broken characters are no text to continue from."""
    return "" if _BROKEN in tail else tail
