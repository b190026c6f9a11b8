"""Numbers of tokens of a request, estimated from the bytes of its body without parsing it."""

from __future__ import annotations

import re

from slime_policies.prompt_key import find_prompt

__all__ = ["MeanLength", "completions_of", "limit_beside_prompt", "limit_of", "prompt_tokens_of"]

#: Within a JSON string the quotes would have backslashes, so text of a prompt does not match these names.
_LIMITS = (b'"max_new_tokens"', b'"max_completion_tokens"', b'"max_tokens"')
_COMPLETIONS = b'"n"'
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})(?!\d)")
_LIMIT = re.compile(rb'"max_(?:new_|completion_)?tokens"\s*:\s*(\d{1,9})(?!\d)')
#: Bytes at the end of a body in which a limit is looked for: parameters stand before or after a prompt.
_TAIL = 1024
_MAX_COMPLETIONS = 1024
#: SGLang's own ``max_new_tokens`` for a request without one.
_FIRST_MEAN = 128
#: The mean covers about this many of the last lengths.
_MEAN_OVER = 256


def prompt_tokens_of(body: bytes) -> int:
    """Return about how many tokens the prompt in ``body`` has, at least 1. The bytes after the prompt count, too."""
    start, per_token = find_prompt(body)
    return max(1, (len(body) - (start or 0)) // per_token)


def limit_of(body: bytes) -> int | None:
    """Return the number of tokens that ``body`` asks for at most in one completion; None if it does not say."""
    return next((limit for name in _LIMITS if (limit := _number(body, name)) is not None), None)


def limit_beside_prompt(body: bytes, start: int | None) -> int | None:
    """Return a limit as :func:`limit_of` does, but search only before the prompt and in the last 1,024 bytes. O(1).

    ``start``: the place of the prompt in ``body``, as :func:`slime_policies.prompt_key.find_prompt` finds it. If it is
    None, the first and the last 1,024 bytes are searched.
    """
    found = _LIMIT.search(body, 0, start or _TAIL) or _LIMIT.search(body, max(start or 0, len(body) - _TAIL))
    return int(found[1]) if found is not None else None


def completions_of(body: bytes) -> int:
    """Return the number of completions for each prompt, the ``n`` of ``body``: at least 1, at most 1,024."""
    return max(1, min(_number(body, _COMPLETIONS) or 1, _MAX_COMPLETIONS))


def _number(body: bytes, name: bytes) -> int | None:
    at = body.find(name)
    found = _NUMBER.match(body, at + len(name)) if at >= 0 else None
    return int(found[1]) if found is not None else None


class MeanLength:
    """Mean of the last lengths in tokens, or of the last limits; 128 before the first one."""

    __slots__ = ("_count", "tokens")

    def __init__(self) -> None:
        self._count = 0
        self.tokens = float(_FIRST_MEAN)

    def learn(self, tokens: int) -> None:
        """Take a length, or a limit, of ``tokens`` into account."""
        self._count = min(self._count + 1, _MEAN_OVER)
        self.tokens += (tokens - self.tokens) / self._count
