"""The error of requests that need demoted trajectories."""

from __future__ import annotations

from router_core.errors import HTTPError

__all__ = ["StoreFailed"]


class StoreFailed(HTTPError):
    """Demoted trajectories cannot be read from their store now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"
