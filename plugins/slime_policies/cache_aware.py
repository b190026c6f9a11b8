"""Policy that prefers the worker with most of the prompt in its cache, while the loads are balanced."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.prefixes import Prompt, Seen
from slime_policies.settings import Settings, unbalanced

__all__ = ["CacheAware"]


class CacheAware:
    """``--policy cache_aware`` of the SGLang gateway, with :mod:`slime_policies.prefixes` for its tree.

    - If the loads differ by more than ``balance_abs_threshold`` requests and by more than a factor of
      ``balance_rel_threshold``, or the prompt has less than 128 bytes: the worker with the fewest requests in flight.
    - Else, if a worker has seen more than ``cache_threshold`` of the prompt: the worker that has seen most.
    - Else the worker with the fewest in flight, and of several, the one that has seen the fewest bytes of prompts. (By
      bytes alone, as in early gateways, one worker would get a whole burst of new prompts.)

    Ties are broken at random.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: dict[str, Seen] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        prompt = Prompt.of(exchange.request.body)
        if not prompt.parts:
            return least_in_flight(workers)
        chosen = self._choose(prompt, workers)
        seen = self._seen.get(chosen.id)
        if seen is None:
            seen = self._seen[chosen.id] = Seen(self._settings.max_tree_size)
        seen.add(prompt)
        return chosen

    def _choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        if unbalanced(workers, self._settings):
            return least_in_flight(workers)
        return least_in_flight(self._knowing(prompt, workers) or self._empty(workers))

    def _knowing(self, prompt: Prompt, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return the workers that have seen most of ``prompt``; none when that is too little."""
        knowing = [(worker, seen) for worker in workers if (seen := self._seen.get(worker.id))]
        matched = 0
        for digest, size in prompt.parts:
            further = [pair for pair in knowing if digest in pair[1]]
            if not further:
                break
            knowing = further
            matched += size
        if matched <= prompt.size * self._settings.cache_threshold:
            return ()
        return [worker for worker, _ in knowing]

    def _empty(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return the workers with the fewest requests in flight; of these, those that have seen the fewest bytes."""
        fewest = min(worker.in_flight for worker in workers)
        sizes = {
            worker: seen.size if (seen := self._seen.get(worker.id)) else 0
            for worker in workers
            if worker.in_flight == fewest
        }
        least = min(sizes.values())
        return [worker for worker, size in sizes.items() if size == least]

    def forget(self, worker: Worker) -> None:
        for choice in worker.choices:
            self._seen.pop(choice.id, None)

    def forget_all(self) -> None:
        self._seen.clear()
