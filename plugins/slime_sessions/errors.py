"""The error for unknown paths. It lies outside of the compiled modules, where it would lose its ``status``."""

from __future__ import annotations

from router_core.errors import HTTPError

__all__ = ["NothingThere"]


class NothingThere(HTTPError):
    """An unknown path below a session."""

    status, type, code = 404, "not_found_error", "NOT_FOUND"
