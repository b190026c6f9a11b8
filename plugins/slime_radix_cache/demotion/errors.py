"""Errors of demoted trajectories that requests may meet."""

from __future__ import annotations

from router_core.errors import HTTPError

__all__ = ["NotNoted", "StoreFailed"]


class StoreFailed(HTTPError):
    """Demoted trajectories cannot be read from their store now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"


class NotNoted(HTTPError):
    """A request whose answer could be mistaken for an earlier one after a kill: the log cannot be written now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"
    headers = ((b"retry-after", b"1"),)  # the request has waited already
