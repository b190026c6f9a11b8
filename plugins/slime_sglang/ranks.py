"""Data-parallel ranks: each rank is a target of its worker, and a generation that goes to a rank names the rank.

A server with ``dp_size`` above 1 has a scheduler and a prefix cache for each rank. The server uses its ranks in turn,
unless a request names a rank. SGLang reads the rank in the body of a generation, vLLM in a header.
"""

from __future__ import annotations

from collections.abc import Collection

from router_core.exchange import Exchange
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.workers import Worker
from slime_sglang.documents import document_in
from slime_sglang.facts import RANK, dp_rank
from slime_sglang.generation import generates, with_fields, without_fields

__all__ = ["Ranks", "ranks_told", "split"]

#: A larger ``dp_size`` counts as invalid.
_MAX_RANKS = 1024
#: The second field is for SGLang before 0.5.9.
_FIELDS = ("routed_dp_rank", "data_parallel_rank")
_HEADER = b"x-data-parallel-rank"


def ranks_told(server_info: bytes) -> int:
    """Return the ``dp_size`` in an answer to ``/server_info``; 1 when the answer has no valid ``dp_size``."""
    size = (document_in(server_info) or {}).get("dp_size")
    return size if isinstance(size, int) and 1 < size <= _MAX_RANKS else 1


def split(pool: WorkerPool, worker: Worker, size: int) -> None:
    """Set the number of ranks of ``worker``; 1: no ranks. Existing ranks below ``size`` are kept."""
    count = size if size > 1 else 0
    if len(worker.targets) != count:
        known = worker.targets[:count]  # with their requests in flight
        pool.divide(worker, (*known, *(_new_rank(worker, rank) for rank in range(len(known), count))))


def _new_rank(worker: Worker, rank: int) -> Worker:
    return Worker(worker.url, id=f"{worker.id}@{rank}", name=f"{worker.url}@{rank}", facts={RANK: rank})


class Ranks:
    """A Sender that writes the rank into each generation that goes to a rank. ``inner`` does all else.

    A rank that a client names, in the body or in the header, is removed from generations. The router chooses the rank,
    and a server with a single rank may refuse the field. Bodies for passthrough workers stay as they are.
    ``in_header``: each request for a rank, whatever its path, also names the rank in a header.
    """

    def __init__(self, inner: Sender, *, in_header: bool = False) -> None:
        self._inner = inner
        self._in_header = in_header

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """See :class:`router_core.sender.Sender`."""
        self._inner.choose(exchange, but)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """See :class:`router_core.sender.Sender`."""
        worker = exchange.worker
        rank = dp_rank(worker) if worker is not None else None
        is_generation = generates(request) and not (worker is not None and worker.passthrough)
        if is_generation:
            body = request.body if body is None else body
            if rank is None:
                body = without_fields(body, _FIELDS)
            else:
                body = with_fields(body, b",".join(b'"%b":%d' % (name.encode(), rank) for name in _FIELDS))
        told = [(_HEADER, b"%d" % rank)] if self._in_header and rank is not None else []
        if is_generation or told:
            # Changed in place: other senders identify this attempt by its Request. The proxy reads the headers before
            # it awaits.
            request.headers = [*(pair for pair in request.headers if pair[0] != _HEADER), *told]
        return await self._inner.send(exchange, request, body)
