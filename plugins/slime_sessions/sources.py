"""Further fields that name a session, for requests without a session header and without ``session_id``.

Two rollouts with one name are one session: a token that one rollout sampled counts as sampled by the other. So a field
that is often the same for all clients, ``user`` or a key, names a session only if its flag is set.
"""

from __future__ import annotations

import hmac
from typing import Any

from router_core.request import Request
from router_core.router import Router
from slime_sessions.names import is_placeholder, is_usable

__all__ = ["ApiKeySessions", "from_metadata", "from_user"]


def from_metadata(request: Request) -> str | None:
    """Return ``metadata.session_id`` of the body, or None."""
    metadata = request.field("metadata")
    return _usable(metadata.get("session_id")) if isinstance(metadata, dict) else None


def from_user(request: Request) -> str | None:
    """Return ``user`` of the body, OpenAI's name for an end user, or None."""
    return _usable(request.field("user"))


class ApiKeySessions:
    """Names a session by the key in ``Authorization: Bearer KEY``.

    The plugin auth has already removed the router's own keys from requests. A worker's key, a JSON Web Token and a
    placeholder are no names.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def __call__(self, request: Request) -> str | None:
        value = request.header(b"authorization")
        if value is None:
            return None
        words = value.split()
        if len(words) != 2 or words[0].lower() != b"bearer":
            return None
        key = words[1].decode("latin-1")
        if is_placeholder(key) or _is_jwt(key) or self._is_a_workers(words[1]):
            return None
        return _usable(key)

    def _is_a_workers(self, key: bytes) -> bool:
        known = {worker.api_key for worker in self._router.pool} | {self._router.settings.worker_api_key}
        return any(hmac.compare_digest(key, each.encode()) for each in known if each is not None)


def _is_jwt(key: str) -> bool:
    """Return True for three parts, the first of them a JSON object in base64url (RFC 7519)."""
    return key.startswith("eyJ") and key.count(".") == 2


def _usable(name: Any) -> str | None:
    return name if is_usable(name) else None
