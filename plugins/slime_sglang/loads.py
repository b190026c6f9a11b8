"""An engine's load, from its answer to ``/v1/loads``, or to ``/get_load`` (SGLang up to 0.5.9)."""

from __future__ import annotations

from typing import Any

from router_core.errors import WorkerBroke

__all__ = ["loads_in", "tokens_of"]

#: Names of the number of tokens in the KV cache: in ``/v1/loads``, and in ``/get_load``.
_TOKENS = ("num_used_tokens", "num_tokens")


def loads_in(document: Any) -> list[dict[str, Any]]:
    """Return the load of each data-parallel rank. Raises WorkerBroke."""
    loads = document.get("loads") if isinstance(document, dict) else document
    if not isinstance(loads, list) or not all(isinstance(load, dict) for load in loads):
        raise WorkerBroke("its answer has no list of loads")
    return loads


def tokens_of(loads: list[dict[str, Any]]) -> int:
    """Return the number of tokens in the KV caches of all ranks, which the SGLang gateway takes as the load.

    Raises WorkerBroke.
    """
    total = 0
    for load in loads:
        count = next((load[name] for name in _TOKENS if name in load), None)
        if isinstance(count, bool) or not isinstance(count, int):
            raise WorkerBroke(f"its load does not say {_TOKENS[0]}")
        total += count
    return total
