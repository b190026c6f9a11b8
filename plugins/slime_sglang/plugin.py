"""The plugin: registration of SGLang servers as workers, and their data-parallel ranks."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute

from router_core import Exchange, Worker, hookimpl
from router_core.flags import add_flags, flag, read_flags
from router_core.router import Router
from router_core.sender import Sender
from router_core.workers import WorkerChange
from slime_sglang.gateway_flags import add_gateway_flags, without_effect
from slime_sglang.introduction import Introduction
from slime_sglang.misspelt_paths import WRONG_PATH, MisspeltPaths
from slime_sglang.ranks import Ranks, split
from slime_sglang.worker_routes import worker_routes

__all__ = ["SGLang", "add_options", "make_plugin", "provides"]

#: The component that :meth:`SGLang.setup` registers.
provides = ("introduction",)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the plugin. ``ranks``: number of ranks of each worker."""

    dp_aware: bool = flag(
        "--dp-aware", default=False, help="choose a data-parallel rank of a worker for each request"
    )
    ranks: int = flag(
        "--intra-node-data-parallel-size", default=1, above=0, metavar="N",
        help="number of data-parallel ranks of each worker; above 1, workers are not asked for this number",
    )  # fmt: skip


@hookimpl(trylast=True)  # last: it adds those of the gateway's flags that no other plugin has
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)
    add_gateway_flags(parser)


def make_plugin(options: argparse.Namespace) -> SGLang:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    settings = read_flags(Settings, options)
    for line in without_effect(options):
        logger.warning("%s", line)
    return SGLang(ranks=settings.ranks, counts_ranks=settings.dp_aware and settings.ranks == 1)


class SGLang:
    """Introduces workers (component ``"introduction"``) and knows their data-parallel ranks.

    ``ranks``: number of ranks of each worker. ``counts_ranks``: each worker is asked for the number instead.
    """

    def __init__(self, *, ranks: int = 1, counts_ranks: bool = False) -> None:
        self._ranks = ranks
        self._counts_ranks = counts_ranks

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router
        self._introduction = Introduction(router, counts_ranks=self._counts_ranks)
        router.components.register("introduction", self._introduction)

    @hookimpl(trylast=True)  # among the innermost: it writes the rank for each attempt
    def sender(self, inner: Sender) -> Sender:
        some = self._counts_ranks or self._ranks > 1
        return Ranks(inner, in_header=self._ranks > 1) if some else inner

    @hookimpl
    def routes(self, router: Router) -> Sequence[BaseRoute]:
        return worker_routes(router)

    @hookimpl(trylast=True)  # post_response runs in reverse order, so this runs before openai rewrites errors
    def post_response(self, exchange: Exchange) -> Awaitable[None] | None:
        reply, worker = exchange.reply, exchange.worker
        if reply is None or reply.status not in WRONG_PATH or worker is None or worker.passthrough:
            return None
        known = MisspeltPaths(pattern for pattern, _ in self._router.own_paths)
        return known.check(exchange.request.path, reply)

    @hookimpl(tryfirst=True)  # other plugins see the worker with its ranks
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        router = self._router
        if change == "added" and self._ranks > 1:
            split(router.pool, worker, self._ranks)
        elif change == "readmitted" and not router.pool.passthrough:
            if self._introduction.asks_model:
                router.tasks.start_soon(router.registration.look_at, worker)
            elif self._counts_ranks:
                router.tasks.start_soon(self._introduction.count_again, worker)
