"""The place of the prompt in the body of a request, found without parsing it."""

from __future__ import annotations

import re

__all__ = ["find_prompt"]

#: The prompt's key, after which the prompt begins; used if it is near the beginning of the body.
_KEY = re.compile(rb'"(text|input_ids|messages|prompt)"\s*:\s*')
_KEY_WITHIN = 4096
#: Bytes of a token: of English text, on average; of an id, written in decimal with a comma.
_TEXT, _IDS = 4, 6


def find_prompt(body: bytes) -> tuple[int | None, int]:
    """Return where the prompt begins in ``body``, or None without a key, and the bytes of one of its tokens."""
    key = _KEY.search(body, 0, _KEY_WITHIN)
    if key is None:
        return None, _TEXT
    return key.end(), _IDS if key[1] == b"input_ids" else _TEXT
