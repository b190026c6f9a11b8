"""Errors of demoted trajectories that requests may meet."""

from __future__ import annotations

from router_core.errors import HTTPError

__all__ = ["StoreFailed"]


class StoreFailed(HTTPError):
    """Demoted trajectories cannot be read from their store now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"
