"""Numbers of cached tokens in answers of engines, read from the first bytes that have them."""

from __future__ import annotations

import re
from collections.abc import Callable

from router_core.reply import Reply

__all__ = ["CachedTokens"]

#: A quote within a JSON string has a backslash, so these bytes are a whole string: nearly always a field's name.
_PROMPT, _CACHED = b'"prompt_tokens"', b'"cached_tokens"'
_NUMBER = re.compile(rb"\s*:\s*(\d{1,15})(?=[,}\s])")
#: This many last bytes of a piece are searched again with the next piece. A field's name and number fit in them.
_OVERLAP = 64


class CachedTokens:
    """A tap, which sees each piece of a reply. It gives ``note`` the numbers of prompt tokens and of cached tokens.

    The tap reads ``prompt_tokens`` and ``cached_tokens``, as SGLang and vLLM write them in ``meta_info`` and in
    ``usage``. It stops when it has found both numbers. In an answer with several sequences, both numbers are those of
    the first sequence. An answer that lacks one of the numbers is ignored.
    """

    __slots__ = ("_cached", "_is_done", "_note", "_prompt", "_reply", "_rest")

    def __init__(self, reply: Reply, note: Callable[[int, int], object]) -> None:
        self._reply = reply
        self._note = note
        self._prompt: int | None = None
        self._cached: int | None = None
        self._rest = b""
        self._is_done = False

    def watch(self) -> None:
        """Search the whole body if the reply has it; otherwise tap the reply."""
        if (body := self._reply.body) is not None:
            self.feed(body)
        else:
            self._reply.tap(self)

    def feed(self, chunk: bytes) -> None:
        """Look for the numbers in the next bytes."""
        if self._is_done:
            return
        data = self._rest + chunk if self._rest else chunk
        if self._prompt is None:
            self._prompt = _number(data, _PROMPT)
        if self._cached is None:
            self._cached = _number(data, _CACHED)
        if self._prompt is None or self._cached is None:
            self._rest = data[-_OVERLAP:]
            return
        self._is_done = True
        self._rest = b""
        self._note(self._prompt, self._cached)

    def close(self, complete: bool) -> None:
        """Search the body if a plugin has read it and then replaced the reply: the tap got no pieces of that body."""
        if not complete and (body := self._reply.body) is not None:
            self.feed(body)


def _number(data: bytes, name: bytes) -> int | None:
    at = data.find(name)
    if at < 0:
        return None
    found = _NUMBER.match(data, at + len(name))
    return int(found[1]) if found is not None else None
