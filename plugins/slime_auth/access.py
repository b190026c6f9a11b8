"""API keys, and the access level that each request needs.

The access level of a forwarded request depends on the raw path, which is what a worker sees. The path belongs to the
data plane only if its bytes match a path of the data plane. Any other path of a forwarded request, such as
``/%67enerate``, belongs to the control plane.
"""

from __future__ import annotations

import argparse
import hmac
import re
from binascii import Error as BinasciiError
from binascii import a2b_base64
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple, Protocol

from router_core.errors import Forbidden, HTTPError, Unauthorized
from router_core.settings import Secret
from router_core.types import Headers, Scope
from slime_sglang.generation import GENERATION_PATHS

__all__ = ["ROLES", "AuthDecision", "Authenticator", "Caller", "Guard", "Keys", "Level", "NamedKey"]

_READING = ("GET", "HEAD")
#: No authentication scheme puts more words than this into one header.
_MAX_WORDS = 64
_SEPARATORS = re.compile(rb"[,;]")
#: Pieces of a header's value: runs without separators, and single separators. A key in the value must begin where a
#: piece begins, and end where a piece ends.
_PIECES = re.compile(rb"[^\s,;:=\"'`|@()<>{}\[\]\\]+|\S")
_MAX_PIECES = 512
_BASIC = re.compile(rb"basic\s+([^\s,;]+)", re.IGNORECASE)
#: Headers in which clients of other servers put a key. The router accepts no key in them. It removes such a header from
#: the request if the header holds one of the router's keys.
_OTHER_PLACES = frozenset((b"x-api-key", b"api-key", b"cookie", b"proxy-authorization"))
#: Routes of the core that need no key, for orchestrators, and routes that any user may read.
_PUBLIC_PATHS = frozenset(("/health", "/liveness", "/readiness"))
_USER_PATHS = frozenset(("/weight_version",))

#: Data-plane paths of workers beside OpenAI's. /server_info is left out, since it shows the engine's own keys.
_DATA_PLANE = GENERATION_PATHS | frozenset(
    (
        b"/tokenize", b"/detokenize", b"/encode", b"/classify", b"/rerank", b"/score", b"/model_info",
        b"/get_model_info", b"/health_generate", b"/parse_function_call", b"/separate_reasoning", b"/ping",
        b"/api/tags", b"/api/show", b"/api/version",
        # If the plugin radix_cache is not loaded, the router answers these two with an error that names the plugin.
        b"/retrieve_from_text", b"/retrieve_from_messages_template",
    )
)  # fmt: skip
#: Paths of OpenAI's and Anthropic's APIs. Not all of /v1: vLLM loads adapters at /v1/load_lora_adapter.
_OPENAI = re.compile(
    rb"/v1/(audio|chat|classify|completions|detokenize|embeddings|images|messages|models|rerank|responses|score|tokenize)"
    rb"(/(?!\.\.?(/|\Z))[A-Za-z0-9._:~-]+)*"
)


class Level(IntEnum):
    """The access level that a caller has, or that a request needs."""

    OPEN = 0
    TRAFFIC = 1
    ADMIN = 2


#: The SGLang gateway's roles.
ROLES = {"admin": Level.ADMIN, "user": Level.TRAFFIC}


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. ``name``: None when unknown; ``how``: the method of authentication."""

    level: Level
    name: str | None = None
    how: str = "none"


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key that has an owner."""

    caller: Caller
    key: Secret

    @classmethod
    def parse(cls, text: str) -> NamedKey:
        """Parse ``id:name:role:key``. The name is ignored.

        Raises ArgumentTypeError, whose message holds no key.
        """
        owner, _, rest = text.partition(":")
        _, _, rest = rest.partition(":")
        role, _, key = rest.partition(":")
        if not owner or role.lower() not in ROLES or not key:
            raise argparse.ArgumentTypeError("wanted id:name:role:key, with the role admin or user")
        return cls(Caller(ROLES[role.lower()], owner, "api_key"), Secret(key))


class Keys:
    """The router's keys.

    Traffic needs a key only if there is a traffic key. The traffic key also authorizes control calls, unless something
    else does: an admin key, a named key, or a provider of tokens (``closed``).
    """

    def __init__(
        self,
        traffic: Secret | None,
        admin: Secret | None,
        named: Sequence[NamedKey] = (),
        *,
        closed: bool = False,
    ) -> None:
        closed = closed or admin is not None or bool(named)
        self._anybody = Caller(
            Level.OPEN if traffic is not None else Level.TRAFFIC if closed else Level.ADMIN
        )
        self._known = [(each.key.encode("ascii"), each.caller) for each in named]
        for key, name, level in (
            (traffic, "--api-key", Level.TRAFFIC if closed else Level.ADMIN),
            (admin, "--admin-api-key", Level.ADMIN),
        ):
            if key is not None:
                self._known.append((key.encode("ascii"), Caller(level, name, "api_key")))

    def authenticate(self, headers: Headers) -> tuple[Caller, Headers]:
        """Return the caller that ``headers`` authenticate, and the headers without the router's keys.

        All of the router's keys are compared in constant time. A key authenticates only as ``Bearer``. Any
        ``Authorization`` header that holds a key is removed, and any header of ``_OTHER_PLACES`` that holds a key.
        """
        caller = self._anybody
        rest = headers
        for pair in headers:
            if pair[0] != b"authorization":
                continue
            words = pair[1].split()
            token = words[-1] if words else b""
            found = [known for key, known in self._known if hmac.compare_digest(token, key)]
            if found and len(words) == 2 and words[0].lower() == b"bearer":
                caller = max(*found, caller, key=_level)  # of two equal levels, the first, which has a name
            if found or self._among(pair[1]):
                rest = [other for other in rest if other is not pair]
        return caller, [pair for pair in rest if pair[0] not in _OTHER_PLACES or not self._among(pair[1])]

    def _among(self, value: bytes) -> bool:
        """Return True when ``value`` holds a key, in plain text or in ``Basic`` credentials.

        Also return True when ``value`` has more than ``_MAX_WORDS`` words or ``_MAX_PIECES`` pieces.
        """
        if (
            len(value) > 2 * _MAX_WORDS
            and len(_SEPARATORS.sub(b" ", value).split(None, _MAX_WORDS)) > _MAX_WORDS
        ):
            return True
        return self._holds(value) or any(self._holds(_decoded(each)) for each in _BASIC.findall(value))

    def _holds(self, value: bytes) -> bool:
        """Return True when ``value`` holds a key between separators, or more than ``_MAX_PIECES`` pieces."""
        pieces = [each.span() for each in islice(_PIECES.finditer(value), _MAX_PIECES + 1)]
        ends = {end for _, end in pieces}
        found = [
            start
            for key, _ in self._known
            for start, _ in pieces
            if start + len(key) in ends and hmac.compare_digest(value[start : start + len(key)], key)
        ]
        return bool(found) or len(pieces) > _MAX_PIECES


def _decoded(credentials: bytes) -> bytes:
    """Return the name and the password of ``Basic`` credentials; nothing if they are not base64."""
    try:
        return a2b_base64(credentials)
    except BinasciiError:
        return b""


def _level(caller: Caller) -> Level:
    return caller.level


class AuthDecision(NamedTuple):
    """The caller, the level that its request needs, and the ``refusal``, which is None when the request is allowed."""

    caller: Caller
    needed: Level
    refusal: HTTPError | None


class Authenticator(Protocol):
    """Authenticates callers by tokens that another service has signed."""

    def take(self, headers: Headers) -> tuple[str | None, Headers]:
        """Return the token in ``headers``, valid or not, and the headers without any such token."""
        ...

    async def caller(self, token: str) -> Caller:
        """Return the caller that ``token`` names. Raises Unauthorized, or an HTTPError if no keys can be fetched."""
        ...


class Guard:
    """Authenticates the caller of each request, and compares the caller's level with the level that the request needs.

    ``own``: pattern and is-control flag of each path that the router answers itself, in the order of its routes.
    ``tokens``: authenticates callers by tokens, beside the keys. ``public``: the paths that anybody may read.
    """

    def __init__(
        self,
        keys: Keys,
        own: Iterable[tuple[re.Pattern[str], bool]],
        tokens: Authenticator | None = None,
        public: Collection[str] = (),
    ) -> None:
        self._keys = keys
        self._own = list(own)
        self._tokens = tokens
        self._public = public

    async def authorize(self, scope: Scope) -> AuthDecision:
        """Authorize the request of ``scope``, and remove the router's keys and tokens from its headers."""
        sent = scope["headers"]
        caller, scope["headers"] = self._keys.authenticate(sent)
        needed = self.needed(scope)
        if self._tokens is not None:
            token, scope["headers"] = self._tokens.take(scope["headers"])
            if token is not None and caller.level < needed:
                try:
                    caller = max(await self._tokens.caller(token), caller, key=_level)
                except HTTPError as refusal:
                    return AuthDecision(caller, needed, refusal)
        return AuthDecision(
            caller, needed, None if caller.level >= needed else _refusal(caller, needed, sent)
        )

    def needed(self, scope: Scope) -> Level:
        """Return the level that the request of ``scope`` needs."""
        raw: bytes = scope["raw_path"]
        if raw in _DATA_PLANE:
            return Level.TRAFFIC
        path: str = scope["path"]
        for pattern, is_control in self._own:
            if pattern.fullmatch(
                path
            ):  # match() would allow a line break at the end, because of the pattern's $
                if path in self._public and scope["method"] in _READING:
                    return Level.OPEN
                return _for_control(path, scope["method"]) if is_control else Level.TRAFFIC
        return Level.TRAFFIC if _OPENAI.fullmatch(raw) else Level.ADMIN


def _refusal(caller: Caller, needed: Level, sent: Headers) -> HTTPError:
    """Return the error for ``caller``, who sent the headers ``sent``. The error holds no part of a key."""
    if caller.name is not None:
        return Forbidden("this needs the router's admin key (--admin-api-key), or the role admin")
    wanted = f"the router's {'admin ' * (needed is Level.ADMIN)}key: Authorization: Bearer KEY"
    given = [value.split() for name, value in sent if name == b"authorization"]
    if not given:
        got = "no Authorization header"
    elif any(len(words) == 2 and words[0].lower() == b"bearer" for words in given):
        got = "a key that the router does not know"
    else:
        got = "an Authorization header of another form"
    return Unauthorized(f"wanted {wanted}; got {got}")


def _for_control(path: str, method: str) -> Level:
    if method in _READING and path in _PUBLIC_PATHS:
        return Level.OPEN
    return Level.TRAFFIC if method in _READING and path in _USER_PATHS else Level.ADMIN
