"""Numbers of tokens in answers of engines, read from the bytes as they pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ["UsageTap"]

_END = b'_tokens"'
#: A field of a JSON object, by the names of SGLang, OpenAI or Anthropic. Quotes inside a JSON string have backslashes.
_FIELD = re.compile(rb'[{,\s]"(prompt|input|completion|output|cached)_tokens"\s*:\s*(\d{1,15})(?=[,}\s])')
_NAMES = {
    b"prompt": "prompt_tokens", b"input": "prompt_tokens", b"completion": "completion_tokens",
    b"output": "completion_tokens", b"cached": "cached_tokens",
}  # fmt: skip
#: Number of bytes of the last piece that are searched again. A field is shorter, so none is missed.
_OVERLAP = 64
#: SGLang numbers the sequences of a stream only if there are several.
_LATER = re.compile(rb'"index"\s*:\s*[1-9]')


class UsageTap:
    """A tap that finds the numbers of tokens in an answer, such as ``prompt_tokens``, and gives them to ``note``.

    In a stream, later numbers replace earlier numbers. The numbers of a list of answers are added up. ``numbered``:
    events may belong to several sequences. If they do, ``note`` is not called.
    """

    def __init__(self, note: Callable[[Mapping[str, int]], object], *, numbered: bool) -> None:
        self._note = note
        self._numbered = numbered
        self._several = False
        self._is_list: bool | None = None
        self._rest = b""
        self._found: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        """Look for numbers in the next bytes."""
        if self._is_list is None:
            self._is_list = chunk[:1] == b"["
        data, seen = self._rest + chunk, len(self._rest)
        if self._numbered and not self._several:
            self._several = _LATER.search(data) is not None
        at = data.find(_END)
        while at >= 0:
            start = data.rfind(b'"', max(0, at - 12), at) - 1
            field = _FIELD.match(data, start) if start >= 0 else None
            if field is not None and field.end() >= seen:  # else the last piece had the whole field
                name = _NAMES[field[1]]
                self._found[name] = int(field[2]) + (self._found.get(name, 0) if self._is_list else 0)
            at = data.find(_END, at + 1)
        self._rest = data[-_OVERLAP:]

    def close(self, complete: bool) -> None:
        """Give the numbers to ``note``, also if the answer broke off, but not if events belong to several sequences."""
        if not self._several:
            self._note(self._found)
