"""Pairs of a prefill and a decode worker, one for each generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from router_core import Exchange, Worker
from router_core.errors import BadRequest, NoWorker
from router_core.reply import Reply
from router_core.request import Request
from router_core.router import Router
from router_core.sender import Sender
from router_core.workers import WorkerType, least_in_flight
from slime_pd.attempt import Attempt, Pair
from slime_pd.bootstrap import may_be_many, sequences
from slime_sglang.generation import generates

if TYPE_CHECKING:
    from slime_control.contracts import PendingAborts
    from slime_retries.contracts import Breaking

__all__ = ["Pairs"]

_NAME = "pd"


class Pairs:
    """A Sender that gives a generation to a prefill and a decode worker, and any other request to one worker.

    ``inner`` sends to one worker. The exchange leases the decode worker; ``Pair.part`` leases the prefill worker.
    """

    def __init__(self, router: Router, inner: Sender) -> None:
        self._pool = router.pool
        self._select = router.hooks.select_worker
        self._long_work = router.long_work
        self._inner = inner
        self._breakers: Breaking | None = router.components.find("breakers")
        self._pending_aborts: PendingAborts | None = router.components.find("pending_aborts")

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Lease a pair for a generation, else one worker. Avoid the servers ``but`` if possible. Raises NoWorker."""
        pair: Pair | None = exchange.notes.get(_NAME)
        if not generates(exchange.request):
            if pair is not None:
                pair.part.release()
            self._inner.choose(exchange, but)
            return
        prefills, decodes = self._offered(exchange, "prefill"), self._offered(exchange, "decode")
        if pair is None:
            pair = exchange.notes[_NAME] = Pair(exchange)
        avoided = [*but, *pair.failed]
        prefill = self._prefill(exchange, prefills, avoided)
        decode = self._one(exchange, _alike(_left(decodes, avoided), prefill))
        pair.part.lease(prefill)
        exchange.lease(decode)

    def _offered(self, exchange: Exchange, kind: WorkerType) -> Sequence[Worker]:
        workers = [worker for worker in self._pool.usable(kind) if exchange.may_go_to(worker.server)]
        if not workers:
            told = self._pool.standings()
            raise NoWorker(f"no ready {kind} worker is eligible for this request's model or filter: {told}")
        return workers

    def _prefill(self, exchange: Exchange, prefills: Sequence[Worker], avoided: Sequence[Worker]) -> Worker:
        """Choose the prefill worker. A session keeps its worker if it is in ``prefills`` and not avoided."""
        session = exchange.session
        worker = self._pool.of_session(session) if session is not None else None
        if worker is None or worker not in prefills or worker.server in avoided:
            worker = self._one(exchange, _left(prefills, avoided))
            if session is not None:
                self._pool.bind(session, worker)
        return worker

    def _one(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self._select(exchange, workers) or least_in_flight(workers)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Ask the leased pair or worker. A pair's reply is the decode worker's, unless the prefill worker failed.

        Raises HTTPError.
        """
        pair: Pair | None = exchange.notes.get(_NAME)
        if pair is None or pair.part.worker is None:
            return await self._inner.send(exchange, request, body)
        attempt = Attempt(self._inner, self._breakers, exchange, pair, request)
        if self._pending_aborts is not None:
            await attempt.settled(self._pending_aborts, may_rename=body is None)
        asked = request if body is None else Request(request.method, request.target, request.headers, body)
        return await attempt.run(asked.body, await self._sequences(exchange, asked))

    async def _sequences(self, exchange: Exchange, request: Request) -> int | None:
        """Count the sequences of ``request`` if it is a batch; None for one sequence, or if the body is no JSON."""
        if not may_be_many(request.body):
            return None
        if request.is_long_work:
            await self._long_work.run(request.reading(), exchange.client)
        try:
            return sequences(request.json(), request.path)
        except BadRequest:
            return None  # the workers' answers say what is wrong with the body


def _left(workers: Sequence[Worker], avoided: Sequence[Worker]) -> Sequence[Worker]:
    """Return the ``workers`` that are not ``avoided``.

    If no worker is left, return the ``workers`` that are not on the server that was avoided last. If all are on it,
    return all ``workers``.
    """
    servers = {worker.server for worker in workers}
    if last := [server for server in avoided if server in servers][-1:]:
        left = [worker for worker in workers if worker.server not in avoided]
        return left or [worker for worker in workers if worker.server not in last] or workers
    return workers


def _alike(decodes: Sequence[Worker], prefill: Worker) -> Sequence[Worker]:
    """Return the ``decodes`` with the weight version of ``prefill``, or all of them if none has this version.

    Two workers whose versions are both unknown count as having the same version.
    """
    version = prefill.server.weight_version
    return [worker for worker in decodes if worker.server.weight_version == version] or decodes
