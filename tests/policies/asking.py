"""Requests for a policy to choose for, and workers to choose from."""

from __future__ import annotations

from router_core import Exchange, Worker
from router_core.request import Request

__all__ = ["asking", "ready"]


def asking(body: bytes = b"", *, session: str | None = None) -> Exchange:
    """A generation with ``body``."""
    return Exchange(Request("POST", b"/generate", [], body), session=session)


def ready(*loads: int) -> list[Worker]:
    """Workers with so many requests in flight."""
    return [Worker(f"http://127.0.0.1:{port}", in_flight=load) for port, load in enumerate(loads, 1)]
