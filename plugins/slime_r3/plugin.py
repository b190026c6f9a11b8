"""The plugin: it asks workers for routed experts, and records them if the router records tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router_core import Exchange, hookimpl
from router_core.router import Router
from slime_r3.asking import Asking
from slime_r3.settings import Settings

if TYPE_CHECKING:
    from slime_r3.record_store import RecordStore
    from slime_r3.recorder import Recorder

__all__ = ["R3"]


class R3:
    """Adds ``return_routed_experts: true`` to generations without the field, unless ``--r3-inject`` is ``when-asked``.

    With the plugin ``radix_cache``, which parses requests and answers, the rows of recorded turns are kept. A row has
    the experts of one token.
    """

    _asking: Asking  # set in setup

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder: Recorder | None = None

    @hookimpl(trylast=True)  # after ``radix_cache`` is set up
    def setup(self, router: Router) -> None:
        """Register the recorder if the router records tokens."""
        self._asking = Asking(self._settings, router)
        if "verdicts" in router.components:
            from slime_r3.recorder import Recorder  # imports numpy (20 MB), which only recording needs

            self._recorder = Recorder(self._settings, router, self._asking)
            router.components.register("token_rows", self._recorder)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """If there is a store for demoted trajectories, move rows to it while memory has no room for them."""
        store: RecordStore | None = router.components.find("cold_store")
        if store is not None and self._recorder is not None:
            self._recorder.keep_in(store, router.tasks)
        yield

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        """Ask for routed experts. Before a ``/generate``, wait for a limited time for room for rows in memory."""
        if self._recorder is not None and exchange.request.path == "/generate":
            await self._recorder.room()
        await self._asking.inject(exchange)
