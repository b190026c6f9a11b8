"""Secrets that logs and traces must not show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["hidden_key"]


def hidden_key(session: str | None, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return ``session``, or a digest of it if ``Authorization`` contains it, as with ``--session-from-api-key``."""
    if session is None:
        return None
    name = session.encode("utf-8", "surrogatepass")
    if any(key == b"authorization" and name in value for key, value in headers):
        return f"key:{hashlib.sha256(name).hexdigest()[:16]}"
    return session
