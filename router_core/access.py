"""Who gets in: keys, what each of them opens, and the key that a worker wants of us.

What a worker will see decides, not what a path may mean: a path that goes to a worker and is not written letter
for letter as one of the data plane's is control, and so is ``/%67enerate``.
"""

from __future__ import annotations

import argparse
import hmac
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

from router_core.errors import Forbidden, HTTPError, Unauthorized
from router_core.types import GENERATION_PATHS, Headers, Scope

if TYPE_CHECKING:
    from router_core.workers import Worker

__all__ = ["Guard", "Keys", "Level", "Secret", "auth_headers"]

_VISIBLE = re.compile(r"[!-~]+")
_READING = ("GET", "HEAD")
#: The core's own routes that say nothing of value, for orchestrators; reading one that says a little.
_ANYBODYS = frozenset(("/health", "/liveness", "/readiness"))
_TRAFFICS = frozenset(("/weight_version",))

#: What workers answer to those who generate, beside OpenAI's paths. Not /server_info: it tells the engine's own keys.
_DATA_PLANE = GENERATION_PATHS | frozenset(
    (
        b"/tokenize", b"/detokenize", b"/encode", b"/classify", b"/rerank", b"/score", b"/model_info",
        b"/get_model_info", b"/health_generate", b"/parse_function_call", b"/separate_reasoning", b"/ping",
        b"/api/tags", b"/api/show", b"/api/version",
    )
)  # fmt: skip
#: OpenAI's and Anthropic's. Not all of /v1: vLLM loads adapters at /v1/load_lora_adapter.
_OPENAI = re.compile(
    rb"/v1/(audio|chat|classify|completions|detokenize|embeddings|images|messages|models|rerank|responses|score|tokenize)"
    rb"(/(?!\.\.?(/|\Z))[A-Za-z0-9._:~-]+)*"
)


class Secret(str):
    """A key; its ``repr`` does not tell it. Raises ArgumentTypeError for one that no header can carry, also untold."""

    __slots__ = ()

    def __new__(cls, text: str) -> Secret:
        if not _VISIBLE.fullmatch(text):
            raise argparse.ArgumentTypeError("wanted a key of visible ASCII characters, without spaces")
        return super().__new__(cls, text)

    def __repr__(self) -> str:
        return "Secret(...)"


class Level(IntEnum):
    """What somebody may do, and what a request needs."""

    OPEN = 0
    TRAFFIC = 1
    ADMIN = 2


class Keys:
    """The router's keys. One that stands alone: a traffic key opens everything, beside an admin key traffic is open."""

    def __init__(self, traffic: Secret | None, admin: Secret | None) -> None:
        self._anybody = Level.TRAFFIC if traffic is None else Level.OPEN
        levels = ((traffic, Level.ADMIN if admin is None else Level.TRAFFIC), (admin, Level.ADMIN))
        self._known = [(key.encode("ascii"), level) for key, level in levels if key is not None]

    def shown(self, headers: Headers) -> tuple[Level, bool, Headers]:
        """What ``headers`` allow, whether they hold a key, and the headers without it.

        A key is compared in constant time, and with all there are. It is taken away under any scheme, and counts
        as ``Bearer`` only.
        """
        level, known = self._anybody, False
        rest = headers
        for pair in headers:
            if pair[0] != b"authorization":
                continue
            words = pair[1].split()
            token = words[-1] if words else b""
            opened = [opens for key, opens in self._known if hmac.compare_digest(token, key)]
            if opened:
                rest = [other for other in rest if other is not pair]
                if len(words) == 2 and words[0].lower() == b"bearer":
                    level, known = max(level, *opened), True
        return level, known, rest


class Guard:
    """What each request needs, and whether it shows it.

    ``own``: the paths that the router answers itself, in the order of its routes, and whether they are the core's.
    """

    def __init__(self, keys: Keys, own: Iterable[tuple[re.Pattern[str], bool]]) -> None:
        self._keys = keys
        self._own = list(own)

    def refusal(self, scope: Scope) -> HTTPError | None:
        """Why the request of ``scope`` is not let in; None: it is, and its headers hold no key of the router's."""
        level, known, scope["headers"] = self._keys.shown(scope["headers"])
        needed = self.needed(scope)
        if level >= needed:
            return None
        if known:
            return Forbidden("this needs the router's admin key (--admin-api-key)")
        return Unauthorized(
            f"wanted the router's {'admin ' * (needed is Level.ADMIN)}key: Authorization: Bearer KEY"
        )

    def needed(self, scope: Scope) -> Level:
        """What the request of ``scope`` needs."""
        raw: bytes = scope["raw_path"]
        if raw in _DATA_PLANE:
            return Level.TRAFFIC
        path: str = scope["path"]
        for pattern, of_core in self._own:
            if pattern.match(path):
                return _of_core(path, scope["method"]) if of_core else Level.TRAFFIC
        return Level.TRAFFIC if _OPENAI.fullmatch(raw) else Level.ADMIN


def _of_core(path: str, method: str) -> Level:
    if method in _READING and path in _ANYBODYS:
        return Level.OPEN
    return Level.TRAFFIC if method in _READING and path in _TRAFFICS else Level.ADMIN


def auth_headers(worker: Worker) -> dict[str, str]:
    """What a request to ``worker`` must carry besides: the key that it was registered with, if any."""
    return {} if worker.api_key is None else {"authorization": f"Bearer {worker.api_key}"}
