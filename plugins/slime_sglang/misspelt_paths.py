"""Hints for misspelt paths, which an engine answers with a bare "Not Found"."""

from __future__ import annotations

import re
from collections.abc import Iterable

from router_core.errors import HTTPError
from router_core.reply import Reply
from slime_sglang.generation import GENERATION_PATHS
from slime_start.suggestions import closest

__all__ = ["MisspeltPaths", "UnknownPath"]

#: Answers of Starlette and of FastAPI to a path that they do not know. An engine's other 404s say more.
_BARE = re.compile(rb'Not Found|\{"detail": ?"Not Found"\}')
_LONGEST_BODY = 32
_LONGEST_PATH = 64


class UnknownPath(HTTPError):
    """The engine does not have the path of the request, but a known path is similar."""

    status, type, code = 404, "not_found_error", "UNKNOWN_PATH"


class MisspeltPaths:
    """Finds the known path closest to a misspelt path. ``own``: patterns of paths that the router answers itself."""

    def __init__(self, own: Iterable[re.Pattern[str]]) -> None:
        literal = (path.pattern[1:-1].replace("\\", "") for path in own if "(" not in path.pattern)
        self._known = (*sorted(path.decode() for path in GENERATION_PATHS), *literal)

    async def check(self, path: str, reply: Reply) -> None:
        """Raise UnknownPath if ``path`` looks misspelt, and ``reply``, an engine's 404, says only "Not Found"."""
        length = reply.header(b"content-length") or b""
        if not length.isdigit() or int(length) > _LONGEST_BODY or len(path) > _LONGEST_PATH:
            return
        meant = closest(path, self._known)
        if meant not in (None, path) and _BARE.fullmatch(await reply.read(_LONGEST_BODY)):
            raise UnknownPath(f"Not Found: no engine has the path {path}; did you mean {meant}?")
