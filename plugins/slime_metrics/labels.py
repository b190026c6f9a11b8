"""Values of labels: each from a closed set, whatever clients and workers send."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

from router_core.errors import HTTPError
from slime_sglang.known_paths import KNOWN_PATHS

__all__ = ["ENDPOINTS", "OTHER", "Labels", "error_codes"]

OTHER = "other"
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
_STATUSES = frozenset(HTTPStatus)
#: nginx's number for a client that hung up before its answer. A worker may send it, too.
_CLIENT_GONE = 499

#: Paths at which engines generate, and the names that the SGLang gateway has for them.
ENDPOINTS = {
    "/generate": "generate",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
_GROUP = re.compile(r"\(\?P<(\w+)>[^)]*\)")


class Labels:
    """The closed sets of label values of a router. A value that is in its set already stays as it is.

    ``own_paths``: the patterns of the router's own routes.
    """

    def __init__(self, own_paths: Iterable[re.Pattern[str]]) -> None:
        written = [(pattern, _written(pattern)) for pattern in own_paths]
        self._exact = frozenset((*ENDPOINTS, *KNOWN_PATHS, *(path for _, path in written)))
        self._patterns = [(pattern, path) for pattern, path in written if "{" in path]

    def path(self, path: str) -> str:
        """Return ``path``, or the pattern of its route with ``{parameters}``; ``"other"`` for an unknown path."""
        if path in self._exact:
            return path
        found = (written for pattern, written in self._patterns if pattern.fullmatch(path))
        return next(found, OTHER)

    @staticmethod
    def method(method: str) -> str:
        """Return ``method`` if it is one of HTTP's usual methods, else ``"OTHER"``."""
        return method if method in _METHODS else "OTHER"

    @staticmethod
    def status(status: int) -> int:
        """Return ``status`` if HTTP knows it, else the first status of its class.

        499 stays, and 0, which means that there was no answer, becomes 499. Other numbers become 500.
        """
        if status in _STATUSES or status == _CLIENT_GONE:
            return status
        return status // 100 * 100 if 100 <= status < 600 else _CLIENT_GONE if status == 0 else 500


def _written(pattern: re.Pattern[str]) -> str:
    """Return the path of a Starlette route, from its pattern."""
    path = pattern.pattern.removeprefix("^").removesuffix("$")
    return re.sub(r"\\(.)", r"\1", _GROUP.sub(r"{\1}", path))


def error_codes() -> frozenset[str]:
    """Return the codes of all errors that the core and the loaded plugins have."""
    kinds: list[type[HTTPError]] = [HTTPError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return frozenset((*(kind.code for kind in kinds), "HTTP_404", "HTTP_405"))  # two of Starlette's
