"""The plugin: it opens the tiers, and keeps the records that the radix cache demotes (removes from its memory)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router_core import hookimpl
from router_core.errors import StartupError
from router_core.router import Router
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.metrics import offer_metrics, tiers_of
from slime_tiered_store.settings import STOP, Settings
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tiers.settings import TierSettings, open_tiers

__all__ = ["TieredStorePlugin"]


class TieredStorePlugin:
    """A store of records in memory, on SSD and in a remote store; the component ``"cold_store"``."""

    def __init__(self, settings: Settings, tiers: TierSettings) -> None:
        self._tiers = tiers
        self._policy = settings.eviction
        self.records = ColdRecords(wait_s=settings.keep_s, stops_on_loss=settings.on_loss == STOP)

    @hookimpl
    def setup(self, router: Router) -> None:
        """Register the component. Raises StartupError if ``--trajectory-log`` is set."""
        if "log_directory" in router.components:
            raise StartupError(
                "--plugin tiered_store cannot be combined with --trajectory-log: leave out the flag, "
                "or the plugin if all trajectories fit into memory"
            )
        router.components.register("cold_store", self.records)
        offer_metrics(router.components.find("metrics"), self.records)

    @hookimpl(
        tryfirst=True
    )  # radix_cache reads records when its lifespan begins, and writes them when it ends
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Open the tiers, and close them at the end."""
        tiers = await open_tiers(self._tiers, LAYOUT.block_bytes)
        try:
            if tiers.remote is not None:
                router.tasks.start_soon(tiers.remote.tidy)
            async with TieredStore(
                LAYOUT,
                tiers.memory,
                tiers.ssd,
                tiers.remote,
                policy=self._policy,
                wait_s=self._tiers.wait_s,
            ) as store:
                each = [tier for tier in (tiers.memory, tiers.ssd, tiers.remote) if tier is not None]
                with self.records.kept_in(store, each, tiers.logs):
                    router.tasks.start_soon(self.records.move)
                    if self.records.stops_on_loss:
                        router.tasks.start_soon(self.records.losses.stop)
                    yield
        finally:
            await tiers.aclose()

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        """Return ``GET /store``."""

        async def show(_: Request) -> Response:
            return Response(orjson.dumps(self.as_dict()), media_type="application/json")

        return [Route("/store", show, methods=["GET"])]

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes and counters of the records and of the tiers, ready for JSON."""
        records = self.records
        return {
            "records": len(records),
            "record_blocks": records.num_blocks,
            "waits": records.waits,
            "lost": records.losses.count,
            "tiers": tiers_of(records),
        }
