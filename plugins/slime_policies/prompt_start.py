"""The first tokens of a prompt, read from the bytes of a request without parsing all of it."""

from __future__ import annotations

import re

from slime_policies.prompt_key import BYTES_PER_TOKEN, find_prompts

__all__ = ["PromptStart"]

#: What may stand before the first prompt of a list.
_OPENING = re.compile(rb"[\s\[]*")
_STRING = re.compile(rb'"((?:[^"\\]+|\\.)*)', re.DOTALL)
_MARK = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)
_SPACE = b" \t\r\n"


class PromptStart:
    """Finds the first ``tokens`` ids of a prompt. Of a text or of messages, it finds the first ``4 * tokens`` bytes."""

    def __init__(self, tokens: int) -> None:
        self._size = tokens * BYTES_PER_TOKEN
        self._ids = re.compile(rb"\d+(?:\s*,\s*\d+){0,%d}" % (tokens - 1))

    def of(self, body: bytes) -> bytes:
        """Return the beginning of the prompt in ``body``; ``b""`` without a prompt.

        Of a list of prompts, the first one counts. The bytes are those of ``body``, but without white space between
        ids. O(tokens).
        """
        for place, _ in find_prompts(body):
            opening = _OPENING.match(body, place)
            assert opening is not None  # narrowing: the match may be empty
            begin = opening.end()
            ids = self._ids.match(body, begin)
            if ids is not None:
                return ids[0].translate(None, _SPACE)
            text = _STRING.match(body, begin, begin + 1 + self._size)
            if text is not None:
                return text[1]
            if body.startswith(b"{", begin) and b"[" in opening[0]:
                return _value(body, place, place + self._size)
        return b""


def _value(body: bytes, begin: int, end: int) -> bytes:
    """Return the JSON list at ``begin``, up to ``end`` at most."""
    depth = 0
    for mark in _MARK.finditer(body, begin, end):
        if mark[0] in (b"[", b"{"):
            depth += 1
        elif mark[0] in (b"]", b"}"):
            depth -= 1
        if not depth:
            return body[begin : mark.end()]
    return body[begin:end]
