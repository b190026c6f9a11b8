"""JSON documents in which workers describe themselves."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["document_in"]


def document_in(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``body``, or None."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
