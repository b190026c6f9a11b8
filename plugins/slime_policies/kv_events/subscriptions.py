"""Subscriptions to the KV events of all workers. This module needs zmq, which is an extra."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio
import zmq.asyncio

from router_core import HTTPError, Worker
from router_core.router import Router
from router_core.workers import WorkerType
from slime_policies.kv_events.blocks import Blocks, WorkerBlocks
from slime_policies.kv_events.publisher import Publisher, publisher_of
from slime_policies.kv_events.stream import EventStream, Tally
from slime_policies.kv_events.subscription import Subscription
from slime_sglang.facts import dp_rank

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["Subscriptions"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at the list of workers.
_LOOK_S = 0.5
#: Seconds until an engine is asked again for its publisher: ``_AGAIN_S`` after a connection or a failed attempt to make
#: one, ``_LATER_S`` if there was a reason not to try.
_AGAIN_S, _LATER_S = 1.0, 30.0


class Subscriptions:
    """Keeps a connection to the publisher of each worker or rank. ``blocks``: the blocks of each type of worker."""

    def __init__(self, blocks: Mapping[WorkerType, Blocks]) -> None:
        self._blocks = blocks
        self._tally = Tally()
        #: By the id of the worker or rank: its name, and its blocks.
        self._open: dict[str, tuple[str, WorkerBlocks]] = {}

    def offer(self, metrics: Metrics) -> None:
        """Add the metrics of KV events."""
        tally, opened = self._tally, self._open
        metrics.gauge(
            "slime_kv_events_known",
            "1: the cache of the worker is known from its KV events. 0: it is not.",
            lambda: {name: int(blocks.is_in_sync) for name, blocks in opened.values()},
            ["worker"],
        )
        metrics.gauge(
            "slime_kv_events_blocks",
            "Blocks in the cache of the worker, from its KV events.",
            lambda: {name: len(blocks) for name, blocks in opened.values()},
            ["worker"],
        )
        for name, told, read in (
            ("batches", "Batches of KV events that were applied.", lambda: tally.batches),
            ("replayed", "Batches of KV events that came from replays.", lambda: tally.replayed),
            ("malformed", "Batches of KV events that were malformed.", lambda: tally.malformed),
            ("dropped", "Times that all blocks of a worker were dropped.", lambda: tally.dropped),
        ):
            metrics.counter(f"slime_kv_events_{name}_total", told, read)

    async def run(self, router: Router) -> None:
        """Follow the workers of ``router`` until cancelled."""
        context = zmq.asyncio.Context()
        try:
            async with anyio.create_task_group() as tasks:
                scopes: dict[str, anyio.CancelScope] = {}
                while True:
                    choices = self._choices(router)
                    for left in scopes.keys() - choices.keys():
                        scopes.pop(left).cancel()
                    for new in choices.keys() - scopes.keys():
                        scopes[new] = anyio.CancelScope()
                        tasks.start_soon(self._follow, router, choices[new], context, scopes[new])
                    await anyio.sleep(_LOOK_S)
        finally:
            context.destroy(linger=0)

    def _choices(self, router: Router) -> dict[str, Worker]:
        workers = [each for each in router.pool if each.kind in self._blocks and not each.passthrough]
        return {choice.id: choice for worker in workers for choice in worker.choices}

    async def _follow(
        self, router: Router, choice: Worker, context: zmq.asyncio.Context, scope: anyio.CancelScope
    ) -> None:
        all_blocks = self._blocks[choice.server.kind]
        blocks = all_blocks.open(choice.id)
        self._open[choice.id] = choice.name, blocks
        told = ""
        try:
            with scope:
                while True:
                    reason = await self._follow_once(router, choice, context, blocks)
                    if reason and reason != told:
                        logger.info("no KV events of %s: %s", choice.name, reason)
                    told = reason
                    await anyio.sleep(_LATER_S if reason else _AGAIN_S)
        finally:
            del self._open[choice.id]
            all_blocks.close(choice.id)

    async def _follow_once(
        self, router: Router, choice: Worker, context: zmq.asyncio.Context, blocks: WorkerBlocks
    ) -> str:
        """Follow one connection until it ends or fails, and return an empty string.

        If there is a reason not to try a connection, return that reason.
        """
        try:
            publisher = await _publisher(router, choice)
            if publisher is None:
                return "/server_info names no publisher; start the engine with --kv-events-config"
            if publisher.ranks > 1 and dp_rank(choice) is None:
                return f"each of its {publisher.ranks} data-parallel ranks has a cache; add --dp-aware"
            for endpoint in filter(None, (publisher.endpoint, publisher.replay)):
                await router.addresses.admit(endpoint.replace("tcp:", "http:", 1))
            stream = EventStream(choice.name, blocks, self._tally)
            await Subscription(context, publisher, stream, self._tally).follow()
        except HTTPError as error:  # such as an address to which the router may not connect
            return str(error)
        except Exception as error:  # a fault of a worker must not end the router
            logger.debug("no KV events of %s: %s: %s", choice.name, type(error).__name__, error)
        return ""


async def _publisher(router: Router, choice: Worker) -> Publisher | None:
    server, rank = choice.server, dp_rank(choice) or 0
    for path in ("/server_info", "/get_server_info"):
        status, body = await router.registration.get(server, path)
        if status != 404:
            break
    return publisher_of(body, server.url, rank) if status == 200 else None
