"""Hints for wrong paths and methods, when the engine's answer gives no hint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from router_core.errors import HTTPError
from router_core.reply import Reply
from slime_sglang.generation import GENERATION_PATHS
from slime_start.suggestions import closest

__all__ = ["WRONG_PATH", "MisspeltPaths", "UnknownPath", "WrongMethod"]

#: Statuses of answers that :meth:`MisspeltPaths.check` takes.
WRONG_PATH = (307, 308, 404, 405)

#: Answers of Starlette and of FastAPI to a path or a method that they do not know. An engine's other errors say more.
_BARE = re.compile(rb'(Not Found|Method Not Allowed)|\{"detail": ?"(Not Found|Method Not Allowed)"\}')
_LONGEST_BODY = 40
_LONGEST_PATH = 64


class UnknownPath(HTTPError):
    """The engine does not have the path of the request, but a known path is similar."""

    status, type, code = 404, "not_found_error", "UNKNOWN_PATH"


class WrongMethod(HTTPError):
    """The path of the request is known, but only for the methods ``allowed``."""

    status, type, code = 405, "invalid_request_error", "HTTP_405"

    def __init__(self, allowed: Iterable[str]) -> None:
        wanted = ", ".join(sorted(allowed))
        super().__init__(f"Method Not Allowed: wanted {wanted}")
        self.headers = ((b"allow", wanted.encode()),)


class MisspeltPaths:
    """Finds the known path closest to a misspelt path. ``own``: patterns of paths that the router answers itself."""

    def __init__(self, own: Iterable[re.Pattern[str]]) -> None:
        literal = (path.pattern[1:-1].replace("\\", "") for path in own if "(" not in path.pattern)
        self._known = (*sorted(path.decode() for path in GENERATION_PATHS), "/v1/models", *literal)

    async def check(self, path: str, reply: Reply) -> None:
        """Raise UnknownPath if ``path`` looks misspelt, and WrongMethod if a known path does not have the method.

        An engine's error with a hint of its own raises neither. A redirect to the path without its last slash raises
        UnknownPath: the redirect names the engine, so a client that followed it would bypass the router.
        """
        if reply.status in (307, 308):
            location = urlsplit((reply.header(b"location") or b"").decode("latin-1"))
            if location.path == path[:-1] in self._known:
                raise UnknownPath(f"Not Found: no engine has the path {path}; did you mean {location.path}?")
            return
        length = reply.header(b"content-length") or b""
        if not length.isdigit() or int(length) > _LONGEST_BODY or len(path) > _LONGEST_PATH:
            return
        if reply.status == 405 and path in self._known:
            allowed = re.findall("[A-Z]+", (reply.header(b"allow") or b"").decode("latin-1"))
            if allowed and _BARE.fullmatch(await reply.read(_LONGEST_BODY)):
                raise WrongMethod(allowed)
            return
        meant = closest(path, self._known) if reply.status == 404 else None
        if meant not in (None, path) and _BARE.fullmatch(await reply.read(_LONGEST_BODY)):
            raise UnknownPath(f"Not Found: no engine has the path {path}; did you mean {meant}?")
