"""Comparison of the events of a cumulative stream: each must repeat the text, ids and logprobs of the event before.

The events of an answer of n tokens have O(n²) bytes, so to parse all of them would be slow. Instead, the raw bytes of
the events are compared.
"""

from __future__ import annotations

__all__ = ["RepeatedEvents"]

#: Keys as SGLang writes them; the text comes first. Inside a JSON string their quotes would be escaped.
_TEXT, _IDS, _LOGPROBS = b'"text":', b'"output_ids":', b'"output_token_logprobs":[['
_FINISH, _GOES_ON, _INDEX = b'"finish_reason":', b'"finish_reason":null', b'"index":'


class RepeatedEvents:
    """The events of one sequence. ``took_back``: an event did not repeat the event before it."""

    __slots__ = ("_between", "_ids", "_logprobs", "_text", "took_back")

    def __init__(self) -> None:
        self.took_back = False
        self._text = self._ids = self._logprobs = b""
        #: The last event's bytes from the end of its ids to the end of its logprobs. Empty if :meth:`see_next` cannot
        #: take the next event.
        self._between = b""

    def see(self, event: bytes, *, is_last: bool = False) -> None:
        """Take the next ``event``. The last event may have a shorter text, since a stop string is trimmed."""
        if self._between:
            self._logprobs = self._between[self._between.find(_LOGPROBS) : -1]
            self._between = b""
        start = event.find(_IDS)
        if start < 0:
            return
        end = event.find(b"]", start)
        ids = event[start:end]
        begin = max(event.find(_TEXT, 0, start), 0)
        text = event[begin : event.rfind(b'"', begin, start)]  # without the quote at its end
        repeats = text.startswith(self._text) or (is_last and self._text.startswith(text))
        if not (repeats and _begins(ids, self._ids) and self._repeats_logprobs(event)):
            self.took_back = True
        self._text, self._ids = text, ids
        if self._logprobs and text.startswith(_TEXT) and not (is_last or self.took_back):
            self._expect(event, begin, end)

    def _expect(self, event: bytes, begin: int, end: int) -> None:
        """Prepare :meth:`see_next` for events like ``event``. Its text begins at ``begin``; its ids end at ``end``."""
        start = event.find(_LOGPROBS, end)
        middle = event[end:start]
        goes_on = middle.count(_FINISH) == middle.count(_GOES_ON) == 1
        if begin == 1 and start > end > 0 and goes_on and _INDEX not in middle:
            self._between = middle + self._logprobs + b"]"

    def see_next(self, event: bytes) -> bool:
        """Take ``event`` and return True if it repeats the event before, has no index and is not the last event.

        Otherwise take nothing and return False. Costs a third of :meth:`see`.
        """
        text, ids, between = self._text, self._ids, self._between
        if not (between and event.startswith(text, 1)):
            return False
        start = event.find(_IDS, len(text))
        end = event.find(b"]", start + len(ids))
        if start < 0 or end < 0 or not event.startswith(between, end):
            return False
        new_ids = event[start:end]
        stop = event.find(b"]]", end + len(between) - 1)
        quote = event.rfind(b'"', len(text) + 1, start)
        if stop < 0 or quote < 0 or not _begins(new_ids, ids):
            return False
        if event.find(_FINISH, stop) >= 0 or event.find(_INDEX, stop) >= 0:
            return False
        self._text, self._ids, self._between = event[1:quote], new_ids, event[end : stop + 1]
        return True

    def _repeats_logprobs(self, event: bytes) -> bool:
        start = event.find(_LOGPROBS)
        if start < 0:
            return True
        known = self._logprobs
        self._logprobs = event[start : event.find(b"]]", start + len(known))]
        return _begins(self._logprobs, known)


def _begins(values: bytes, known: bytes) -> bool:
    """Return True if ``values`` begin with ``known``, and the last number of ``known`` ends there in ``values`` too."""
    is_cut = known[-1:].isdigit() and values[len(known) : len(known) + 1].isdigit()
    return values.startswith(known) and not is_cut
