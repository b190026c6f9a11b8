"""Comparison of the events of a cumulative stream: each repeats text, ids and logprobs of the one before.

Parsing every event of an answer of n tokens would be O(n²) and slow. So the raw bytes of events are compared.
"""

from __future__ import annotations

__all__ = ["RepeatedEvents"]

#: None can occur inside a JSON string, where the quotes would be escaped. SGLang writes the text first.
_TEXT, _IDS, _LOGPROBS = b'"text":', b'"output_ids":', b'"output_token_logprobs":[['
_FINISH, _GOES_ON, _INDEX = b'"finish_reason":', b'"finish_reason":null', b'"index":'


class RepeatedEvents:
    """The events of one sequence. ``took_back``: an event did not repeat the one before it."""

    __slots__ = ("_between", "_ids", "_logprobs", "_text", "took_back")

    def __init__(self) -> None:
        self.took_back = False
        self._text = self._ids = self._logprobs = b""
        #: The bytes from the end of the ids to behind the last logprob, if they say that generating goes on.
        self._between = b""

    def see(self, event: bytes, *, is_last: bool = False) -> None:
        """Take the next ``event``. The text of the last event may be shorter, since a stop string is trimmed."""
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
        """Prepare :meth:`see_next` for events like ``event``, whose ids have their ``end`` there."""
        start = event.find(_LOGPROBS, end)
        middle = event[end:start]
        goes_on = middle.count(_FINISH) == middle.count(_GOES_ON) == 1
        if begin == 1 and start > end > 0 and goes_on and _INDEX not in middle:
            self._between = middle + self._logprobs + b"]"

    def see_next(self, event: bytes) -> bool:
        """Take ``event`` if it repeats the one before, has no index and says that generating goes on; else False.

        Nothing is taken then. It costs a third of :meth:`see`.
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
    """Return True if ``values`` begin with ``known``, which does not end in the middle of a number."""
    is_cut = known[-1:].isdigit() and values[len(known) : len(known) + 1].isdigit()
    return values.startswith(known) and not is_cut
