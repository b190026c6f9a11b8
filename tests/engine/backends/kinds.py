"""The backends that the contract suite tests, each with two sets of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.served import JSONDict, Served, served_backend
from slime_engine.backend import Backend, Query
from slime_engine.language import FloatArray
from slime_engine.settings import Settings

__all__ = ["Kind", "logits_after"]


@dataclass(frozen=True)
class Kind:
    """A backend. ``update``: the body of ``/update_weights_from_disk`` that brings other weights, as version 2.

    ``tolerance``: of two computations of one logprob. ``reuses_prefixes``: later sequences get cached tokens.
    """

    name: str
    load: Callable[[Settings], Backend]
    update: JSONDict
    tolerance: float = 0.0
    reuses_prefixes: bool = False
    checkpoint: Path | None = None

    def serve(self, **settings: Any) -> AbstractAsyncContextManager[Served]:
        """Serve an engine with this backend, loaded anew."""
        chosen = Settings(weight_version="1", **settings)
        return served_backend(lambda: self.load(chosen), chosen)

    async def updated(self, version: str) -> Backend:
        """Return a backend of its own with the weights of version 1 or 2."""
        backend = self.load(Settings())
        if version == "2":
            await backend.update_weights("disk", self.update)
        return backend


async def logits_after(backend: Backend, ids: list[int], version: str = "1") -> FloatArray:
    """Return the logits after ``ids``, computed without anything that was computed before."""
    await backend.flush_cache()
    run = backend.begin()
    (rows,) = await backend.logits([Query(run, ids, len(ids))], version)
    backend.release(run)
    logits: FloatArray = rows[0]
    return logits
