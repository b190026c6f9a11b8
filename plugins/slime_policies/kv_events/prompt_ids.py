"""Token ids of a prompt, parsed from the body of a request step by step, as they are needed."""

from __future__ import annotations

import re

import orjson

from slime_policies.prompt_key import find_prompt

__all__ = ["PromptIds"]

#: The beginning of a list of ids. A list of prompts begins otherwise.
_IDS = re.compile(rb"\[\s*\d")
#: Fields that separate a prompt's blocks in the engine's cache from the blocks of other prompts with the same ids.
_APART = (b'"lora_path"', b'"extra_key"', b'"cache_salt"')
#: All characters of a list of ids.
_CHARACTERS = b"0123456789, \t\r\n"
#: Bytes that are parsed in one step, and the most bytes of a prompt that are parsed.
_STEP, _MAX_BYTES = 2048, 1 << 20


class PromptIds:
    """Ids of a single prompt, in the body from ``start`` to ``end``."""

    __slots__ = ("_body", "_next", "end", "ids", "start")

    def __init__(self, body: bytes, start: int, end: int) -> None:
        self._body = body
        self._next = self.start = start
        self.end = end
        #: The ids that are parsed so far.
        self.ids: list[int] = []

    @classmethod
    def of(cls, body: bytes) -> PromptIds | None:
        """Return the ids of the prompt in ``body``, or None.

        The result is None if the body has no ids, has several prompts, or has a field of ``_APART``.
        """
        place, _ = find_prompt(body)
        if place is None or not _IDS.match(body, place):
            return None
        end = body.find(b"]", place)
        if end < 0 or any(body.find(name, 0, place) >= 0 or body.find(name, end) >= 0 for name in _APART):
            return None
        return cls(body, place + 1, min(end, place + _MAX_BYTES))

    def bytes_per_token(self) -> float:
        """Return the mean bytes of an id and its comma among the ids parsed so far; 0 if none is parsed."""
        return (self._next - self.start) / len(self.ids) if self.ids else 0.0

    def read(self, count: int) -> bool:
        """Parse the first ``count`` ids. Return False if there are fewer.

        The body is parsed in steps of about ``_STEP`` bytes. The first step with anything but ids ends the prompt: no
        id of that step counts.
        """
        ids = self.ids
        while len(ids) < count and self._next < self.end:
            cut = self._body.find(b",", self._next + _STEP, self.end)
            if cut < 0:
                cut = self.end
            part = self._body[self._next : cut]
            if part.translate(None, _CHARACTERS):  # takes a fifth of the time of a check of each id
                self.end = self._next
                break
            try:
                ids += orjson.loads(b"[%b]" % part)
            except orjson.JSONDecodeError:
                self.end = self._next
                break
            self._next = cut + 1
        return len(ids) >= count
