"""Policy that places prompts on a hash ring, by their first tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.prompt_start import PromptStart
from slime_policies.ring import WorkerRing
from slime_policies.settings import Settings

__all__ = ["PrefixHash"]


class PrefixHash:
    """Consistent hashing with bounded loads, as ``prefix_hash`` of the SGLang gateway.

    Prompts with the same first ``prefix_token_count`` tokens belong to one worker on a
    :class:`slime_policies.ring.WorkerRing`. In a text or in messages, 4 bytes count as a token. The load of a worker is
    its requests in flight, and the mean load includes the new request. If the prompt's worker has more than
    ``prefix_hash_load_factor`` times the mean load, or if there is no prompt, the worker with the fewest requests in
    flight is chosen.
    """

    def __init__(self, settings: Settings) -> None:
        self._start = PromptStart(settings.prefix_token_count)
        self._load_factor = settings.prefix_hash_load_factor
        self._ring = WorkerRing()

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        start = self._start.of(exchange.request.body)
        if not start:
            return least_in_flight(workers)
        owner = self._ring.owner(start, workers)
        mean = (sum(worker.in_flight for worker in workers) + 1) / len(workers)
        return owner if owner.in_flight <= mean * self._load_factor else least_in_flight(workers)

    def forget(self, worker: Worker) -> None:
        self._ring.forget(worker)

    def forget_all(self) -> None:
        """Do nothing: the workers of prompts do not depend on what the workers' caches hold."""
