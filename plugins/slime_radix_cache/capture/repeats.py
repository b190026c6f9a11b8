"""Comparison of the events of a cumulative stream: each must repeat the text, ids and logprobs of the event before.

The events of an answer of n tokens have O(n²) bytes, so to parse all of them would be slow. Instead, the raw bytes of
the events are compared.
"""

from __future__ import annotations

import re

__all__ = ["RepeatedEvents"]

#: Keys as SGLang writes them; the text comes first. Inside a JSON string their quotes would be escaped.
_TEXT, _IDS, _LOGPROBS = b'"text":', b'"output_ids":', b'"output_token_logprobs":[['
_FINISH, _GOES_ON, _INDEX = b'"finish_reason":', b'"finish_reason":null', b'"index":'
#: The end of the logprobs, and the next key or the end of the event: a token's text may have brackets, too.
_LOGPROBS_END = re.compile(rb'\]\](?:\}?,"\w+":|\}+\Z)')
_DIGITS = b"0123456789"
_NOTHING = memoryview(b"")


class RepeatedEvents:
    """The events of one sequence. ``took_back``: an event did not repeat the event before it."""

    __slots__ = ("_begin", "_between", "_end", "_ids", "_logprobs", "_piece", "_stop", "_text", "took_back")

    def __init__(self) -> None:
        self.took_back = False
        self._text = self._ids = self._logprobs = _NOTHING
        #: The last event's bytes from the end of its ids to the end of its logprobs. Empty if :meth:`see_next` cannot
        #: take the next event.
        self._between = _NOTHING
        #: The event that :meth:`see_next` took last is ``_piece[_begin:_end]``. The views are of ``_piece``.
        self._piece = b""
        self._begin = self._end = 0
        #: The first match of ``_LOGPROBS_END``, the same in each event.
        self._stop = b"]]"

    def take_held(self) -> bytes | None:
        """Return the event that :meth:`see_next` took last, once; None if there is none."""
        piece, self._piece = self._piece, b""
        return piece[self._begin : self._end] if piece else None

    def see(self, event: bytes, *, is_last: bool = False) -> None:
        """Take the next ``event``. The last event may have a shorter text, since a stop string is trimmed."""
        if self._between:
            between = bytes(self._between)
            self._logprobs = memoryview(between)[between.find(_LOGPROBS) : -1]
            self._between = _NOTHING
        start = event.find(_IDS)
        if start < 0:
            return
        end = event.find(b"]", start)
        ids = event[start:end]
        begin = max(event.find(_TEXT, 0, start), 0)
        text = event[begin : event.rfind(b'"', begin, start)]  # without the quote at its end
        known = bytes(self._text)
        repeats = text.startswith(known) or (is_last and known.startswith(text))
        if not (repeats and _begins(ids, bytes(self._ids)) and self._repeats_logprobs(event)):
            self.took_back = True
        self._text, self._ids = memoryview(text), memoryview(ids)
        if self._logprobs and text.startswith(_TEXT) and not (is_last or self.took_back):
            self._expect(event, begin, end)

    def _expect(self, event: bytes, begin: int, end: int) -> None:
        """Prepare :meth:`see_next` for events like ``event``. Its text begins at ``begin``; its ids end at ``end``."""
        start = event.find(_LOGPROBS, end)
        middle = event[end:start]
        goes_on = middle.count(_FINISH) == middle.count(_GOES_ON) == 1
        if begin == 1 and start > end > 0 and goes_on and _INDEX not in middle:
            self._between = memoryview(middle + bytes(self._logprobs) + b"]")

    def see_next(self, piece: bytes, begin: int, end: int) -> bool:
        """Take the event ``piece[begin:end]`` if it repeats the event before, has no index and is not the last event.

        Return True if it is taken. Bytes are only compared where they are: copies would cost more for long answers.
        """
        text, ids, between = self._text, self._ids, self._between
        if not (between and piece.startswith(text, begin + 1)):
            return False
        text_end = begin + 1 + len(text)
        start = piece.find(_IDS, text_end, end)
        ids_end = piece.find(b"]", start + len(ids), end)
        if (
            start < 0
            or ids_end < 0
            or not (piece.startswith(ids, start) and piece.startswith(between, ids_end))
        ):
            return False
        if piece[start + len(ids)] in _DIGITS and ids[-1] in _DIGITS:
            return False  # the last id is another one
        stop = piece.find(self._stop, ids_end + len(between) - 1, end)
        quote = piece.rfind(b'"', text_end, start)
        if stop < 0 or quote < 0 or piece.find(_FINISH, stop, end) >= 0 or piece.find(_INDEX, stop, end) >= 0:
            return False
        if self._stop[-1:] == b"}" and stop + len(self._stop) != end:
            return False
        view = memoryview(piece)
        self._text, self._ids, self._between = (
            view[begin + 1 : quote],
            view[start:ids_end],
            view[ids_end : stop + 1],
        )
        self._piece, self._begin, self._end = piece, begin, end
        return True

    def _repeats_logprobs(self, event: bytes) -> bool:
        start = event.find(_LOGPROBS)
        if start < 0:
            return True
        known = bytes(self._logprobs)
        match = _LOGPROBS_END.search(event, start + len(known))
        self._stop = match.group() if match is not None else b"]]"
        told = event[start : match.start() if match is not None else event.find(b"]]", start + len(known))]
        self._logprobs = memoryview(told)
        return _begins(told, known)


def _begins(values: bytes, known: bytes) -> bool:
    """Return True if ``values`` begin with ``known``, and the last number of ``known`` ends there in ``values`` too."""
    is_cut = known[-1:].isdigit() and values[len(known) : len(known) + 1].isdigit()
    return values.startswith(known) and not is_cut
