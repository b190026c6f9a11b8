"""The place of the prompt in the body of a request, found without parsing the body."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["BYTES_PER_TOKEN", "find_prompt", "find_prompts"]

#: The prompt's key, after which the prompt begins. It is searched for in the first ``_KEY_WITHIN`` bytes of the body.
_KEY = re.compile(rb'"(text|input_ids|messages|prompt)"\s*:\s*')
_KEY_WITHIN = 4096
#: Bytes of a token of English text, on average.
BYTES_PER_TOKEN = 4
#: Bytes of an id in decimal, with its comma, on average.
_BYTES_PER_ID = 6


def find_prompts(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield, for each key of a prompt in ``body``, the place of the prompt and the mean bytes of its tokens."""
    for key in _KEY.finditer(body, 0, _KEY_WITHIN):
        yield key.end(), _BYTES_PER_ID if key[1] == b"input_ids" else BYTES_PER_TOKEN


def find_prompt(body: bytes) -> tuple[int | None, int]:
    """Return the first result of :func:`find_prompts`. Without a key the place is None."""
    return next(find_prompts(body), (None, BYTES_PER_TOKEN))
