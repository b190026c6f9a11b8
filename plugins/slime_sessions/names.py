"""Names of sessions, and how a path or a key gives one."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from router_core.errors import BadRequest

__all__ = ["MAX_BYTES", "PREFIX", "SessionPath", "check_name", "is_placeholder", "is_usable", "read_path"]

#: Of a name that comes from a path, ``user`` or a key: enough for any id, and too little to fill a log.
MAX_BYTES = 512
PREFIX = "/sessions/"

#: Paths below a session. The id is the shortest that leaves one of these: rllm's ids have slashes
#: (``harbor/hello-world:0``; rllm_model_gateway/middleware.py at 9beb6e0f6).
_BELOW = re.compile(rb"/sessions/(?P<id>.*?)(?P<rest>/v1(?:/.*)?|/generate)", re.DOTALL)
_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Keys that programs write where a client library insists on one: a name for everybody is a name for nobody.
_PLACEHOLDERS = frozenset(
    (
        "api-key", "api_key", "default", "dummy", "empty", "fake", "key", "local", "no-key", "none", "not-needed",
        "null", "placeholder", "secret", "sk-dummy", "sk-no-key-required", "test", "token", "token-abc123", "unused",
        "xxx",
    )
)  # fmt: skip


class SessionPath(NamedTuple):
    """A request below a session: its ``name``, and the raw path that is asked there."""

    name: str
    rest: bytes


def read_path(raw: bytes) -> SessionPath | None:
    """The parts of a raw path ``/sessions/{id}/v1/...``; None when it is another one.

    Raises BadRequest for an id that is no name.
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
    """Check a name that is to stand in a path. Raises BadRequest, which says what is ``wanted``."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_BYTES:
        raise BadRequest(f"{wanted}, with an id of 1 to {MAX_BYTES} bytes, got {size}")
    if _CONTROL.search(name):
        raise BadRequest(f"{wanted}, with an id without control characters")
    if name != name.strip(" "):  # which a header would not carry
        raise BadRequest(f"{wanted}, with an id that neither begins nor ends with a space")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise BadRequest(f"{wanted}, with an id that has no empty, '.' or '..' part between slashes")


def is_usable(name: object) -> bool:
    """True when ``name``, of a field that was not made for sessions, can be one's name."""
    return (
        isinstance(name, str)
        and bool(name.strip())
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_BYTES
        and not _CONTROL.search(name)
    )


def is_placeholder(key: str) -> bool:
    """True for a key that is written where none is needed."""
    return key.lower() in _PLACEHOLDERS
