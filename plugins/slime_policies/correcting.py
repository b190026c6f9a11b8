"""A Sender that tells the policy of prefill workers how many tokens of each prompt were in the worker's cache."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from router_core import Exchange, Reply, Worker
from router_core.request import Request
from router_core.sender import Sender
from slime_policies.cached_tokens import CachedTokens
from slime_policies.policy import Corrected

__all__ = ["Correcting"]


class Correcting:
    """Reads the numbers of cached tokens in the answers of prefill workers, and gives them to ``policy``.

    Only the router gets these answers.
    """

    def __init__(self, inner: Sender, policy: Corrected) -> None:
        self._inner = inner
        self._answered = policy.answered

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """See :class:`router_core.sender.Sender`."""
        self._inner.choose(exchange, but)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """See :class:`router_core.sender.Sender`."""
        # The prefill worker of a pair has an exchange of its own. The policy was called with its parent exchange, which
        # is the client's.
        worker, asked = exchange.worker, exchange.parent
        reply = await self._inner.send(exchange, request, body)
        is_prefill = worker is not None and worker.server.worker_type == "prefill"
        if asked is not None and is_prefill and reply.status == 200:
            CachedTokens(reply, partial(self._answered, asked)).watch()
        return reply
