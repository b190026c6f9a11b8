"""The code in an error's body, for the metrics and the request log."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

__all__ = ["MAX_ERROR_BYTES", "code_in"]

#: Bytes of an error's body that are kept for its code.
MAX_ERROR_BYTES = 4096


@lru_cache(maxsize=16)  # the log and the metrics ask for the same body one after the other
def code_in(body: bytes) -> str | None:
    """Return the code in ``body``: ``{"error": {"code": ...}}``, or ``code`` beside ``error``; None without a code."""
    try:
        document: Any = orjson.loads(body)
        error = document["error"]
        code = error["code"] if isinstance(error, dict) else document["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
