"""JSON documents in which workers describe themselves."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["document_in"]


def document_in(body: bytes) -> dict[str, Any] | None:
    """The JSON object in ``body``; None when there is none."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
