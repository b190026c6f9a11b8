"""A router with its own defaults before a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from slime_http.serving import serving
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

__all__ = ["scripted"]


@asynccontextmanager
async def scripted(
    start: Start, *script: list[int] | dict[str, Any] | list[dict[str, Any]], flags: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Running, FakeEngine]]:
    """The embedded engine's tokenizer and template are those of the fake one, which answers with ``script``."""
    plugins = [part for name in ("engine", "radix_cache", "openai") for part in ("--plugin", name)]
    async with start(*plugins, *flags) as running:
        engine = FakeEngine(running.router.components.get("tokenizer"))
        engine.script += script
        async with serving(engine.app) as url:
            for embedded in running.router.pool:
                running.router.pool.remove(embedded)
            worker, _ = await running.router.add_worker(url)
            yield running, engine
            running.router.pool.remove(worker)
