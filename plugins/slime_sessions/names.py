"""Rules for the names of sessions, in paths, fields and keys."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from router_core.errors import BadRequest

__all__ = ["MAX_BYTES", "PREFIX", "SessionPath", "check_name", "is_placeholder", "is_usable", "read_path"]

#: Longest name in a path or in a field, or from a key: enough for any id, and too short to fill a log.
MAX_BYTES = 512
PREFIX = "/sessions/"

#: Paths below a session. The id may have slashes, as rllm's ids have (``harbor/hello-world:0``;
#: rllm_model_gateway/middleware.py at 9beb6e0f6). So it ends before the first of these endings.
_BELOW = re.compile(rb"/sessions/(?P<id>.*?)(?P<rest>/v1(?:/.*)?|/generate)", re.DOTALL)
_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Keys that programs write where a client library insists on a key. Many clients share such a key. It names no session.
_PLACEHOLDERS = frozenset(
    (
        "api-key", "api_key", "default", "dummy", "empty", "fake", "key", "local", "no-key", "none", "not-needed",
        "null", "placeholder", "secret", "sk-dummy", "sk-no-key-required", "test", "token", "token-abc123", "unused",
        "xxx",
    )
)  # fmt: skip


class SessionPath(NamedTuple):
    """A path below a session: the ``name`` of the session, and the ``rest`` of the raw path."""

    name: str
    rest: bytes


def read_path(raw: bytes) -> SessionPath | None:
    """Split a raw path ``/sessions/{id}/v1/...`` or ``/sessions/{id}/generate``. Returns None for any other path.

    Raises BadRequest for an invalid id.
    """
    found = _BELOW.fullmatch(raw)
    if found is None:
        return None
    return SessionPath(_name(found["id"]), found["rest"])


def _name(raw: bytes) -> str:
    wanted = "wanted /sessions/{id}/v1/..."
    if _ESCAPE.search(raw):
        raise BadRequest(f"{wanted}: in the id a % is not followed by two hexadecimal digits")
    try:
        name = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{wanted}, with an id in UTF-8, percent-encoded") from None
    check_name(name, wanted)
    return name


def check_name(name: str, wanted: str) -> None:
    """Check a name for use in a path. Raises BadRequest, whose message begins with ``wanted``."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_BYTES:
        raise BadRequest(f"{wanted}, with an id of 1 to {MAX_BYTES} bytes, got {size}")
    if _CONTROL.search(name):
        raise BadRequest(f"{wanted}, with an id without control characters")
    if name != name.strip(" "):  # a header would lose the space
        raise BadRequest(f"{wanted}, with an id that neither begins nor ends with a space")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise BadRequest(f"{wanted}, with an id that has no empty, '.' or '..' part between slashes")


def is_usable(name: object) -> bool:
    """Return True when ``name``, from a field of the body or from a key, can name a session."""
    return (
        isinstance(name, str)
        and bool(name.strip())
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_BYTES
        and not _CONTROL.search(name)
    )


def is_placeholder(key: str) -> bool:
    """Return True for a key that clients write where no key is needed."""
    return key.lower() in _PLACEHOLDERS
