"""Turns tokens into text, piece by piece.

No piece except the last one ends in an incomplete character, or in the beginning of a stop string that is to be
trimmed.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Collection, Iterable

from slime_engine.language import ModelTokenizer
from slime_engine.sampling import SamplingParams
from slime_engine.sequence import FinishReason, TextDelta, TokenDelta

__all__ = ["Detokenizer", "IncrementalText"]


class IncrementalText:
    """The text of one growing token list, in pieces. The joined pieces are the text of the whole list.

    With ``skip_special_tokens`` the text has no special tokens. Without ``no_stop_trim`` it ends before the stop that
    was matched. No text is ever taken back. So bytes of an unfinished character wait for the next token. Characters
    that may begin a stop string that is to be trimmed wait until the stop string is complete or ruled out. Meanwhile
    pieces may be empty.
    """

    def __init__(self, tokenizer: ModelTokenizer, params: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden: Collection[int] = tokenizer.special_ids if params.skip_special_tokens else ()
        self._stops = () if params.no_stop_trim else params.stop
        self._trims = not params.no_stop_trim
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def _decode(self, ids: Iterable[int]) -> str:
        shown = b"".join(self._token_bytes[one] for one in ids if one not in self._hidden)
        return self._decoder.decode(shown)

    def add(self, ids: list[int]) -> str:
        """Add ``ids`` to the list, and return the next piece."""
        text = self._held + self._decode(ids)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self, ids: list[int], reason: FinishReason) -> str:
        """Add ``ids`` to the list, and return the last piece. An incomplete character becomes U+FFFD.

        The piece ends before the matched stop, except with ``no_stop_trim``.
        """
        matched = reason.get("matched") if self._trims else None
        if isinstance(matched, int):
            ids = ids[:-1]
        text = self._held + self._decode(ids) + self._decoder.decode(b"", final=True)
        if isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` with which ``text`` ends."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Detokenizer:
    """The stage between scheduler and tokenizer manager; one task runs it for all sequences."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        source: asyncio.Queue[list[TokenDelta]],
        target: asyncio.Queue[list[TextDelta]],
    ) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._target = target
        self._texts: dict[str, tuple[IncrementalText, list[str]]] = {}

    async def run(self) -> None:
        while True:
            deltas = await self._source.get()
            self._target.put_nowait([TextDelta(delta, self._text(delta)) for delta in deltas])

    def _text(self, delta: TokenDelta) -> str:
        sequence = delta.sequence
        state = self._texts.get(sequence.rid)
        if state is None:
            state = self._texts[sequence.rid] = (IncrementalText(self._tokenizer, sequence.params), [])
        text, pieces = state
        if delta.finish_reason is None:
            pieces.append(text.add(delta.token_ids))
        else:
            pieces.append(text.finish(delta.token_ids, delta.finish_reason))
            sequence.entry.text = "".join(pieces)
            del self._texts[sequence.rid]
        return pieces[-1]
