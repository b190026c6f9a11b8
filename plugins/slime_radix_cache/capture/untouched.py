"""Marks on answers that are not recorded, such as answers to untouched requests.

An untouched request is passed on as it came, without tokens in place of its prompt.
"""

from __future__ import annotations

from router_core.exchange import Exchange
from router_core.workers import Worker
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.tally import Tally
from slime_sglang.generation import at_generation

__all__ = ["is_only_proxied", "mark_untouched"]

_NOT_EXACT = (b"x-slime-exact", b"false")


def mark_untouched(exchange: Exchange, trajectories: Trajectories, tally: Tally) -> None:
    """Mark an answer that is no error as not exact, and its session as incomplete, if it may be a generation."""
    reply, request, worker = exchange.reply, exchange.request, exchange.worker
    if reply is None or worker is None or reply.status >= 400:
        return
    is_known = at_generation(request)
    # A passthrough worker may generate at any path, such as vLLM's /inference/v1/generate.
    if not is_known and not (is_only_proxied(worker) and request.method == "POST"):
        return
    trajectories.lose(exchange.session)
    # The hook ``pre_request`` has counted an untouched /generate already.
    if is_known and request.path != "/generate":
        tally.untouched(request.path)
    if reply.header(_NOT_EXACT[0]) is None:
        reply.headers = [*reply.headers, _NOT_EXACT]


def is_only_proxied(worker: Worker | None) -> bool:
    """Return True if ``worker`` is a passthrough worker: it may speak any protocol, so nothing is recorded."""
    return worker is not None and worker.passthrough
