"""The worker that has most of the prompt in its cache, as long as none has too much to do."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.prefixes import Prompt, Seen
from slime_policies.settings import Settings

__all__ = ["CacheAware"]


class CacheAware:
    """What ``--policy cache_aware`` is in the SGLang gateway, over :mod:`slime_policies.prefixes` for its tree.

    - The loads differ by more than ``balance_abs_threshold`` requests and by more than a factor of
      ``balance_rel_threshold``: fewest in flight.
    - Else one has seen more than ``cache_threshold`` of the prompt: the one that has seen most.
    - Else the one that has seen least of all prompts, so that they spread.

    Ties go to the fewest in flight, and then to chance.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: dict[str, Seen] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        prompt = Prompt.of(exchange.request.body)
        if not prompt.parts:
            return least_in_flight(workers)
        chosen = least_in_flight(workers if self._unbalanced(workers) else self._suited(prompt, workers))
        seen = self._seen.get(chosen.id)
        if seen is None:
            seen = self._seen[chosen.id] = Seen(self._settings.max_tree_size)
        seen.add(prompt)
        return chosen

    def _unbalanced(self, workers: Sequence[Worker]) -> bool:
        loads = [worker.in_flight for worker in workers]
        most, fewest = max(loads), min(loads)
        settings = self._settings
        return (
            most - fewest > settings.balance_abs_threshold and most > fewest * settings.balance_rel_threshold
        )

    def _suited(self, prompt: Prompt, workers: Sequence[Worker]) -> Sequence[Worker]:
        known = [(worker, self._seen[worker.id]) for worker in workers if worker.id in self._seen]
        matched = 0
        best = known
        for digest, size in prompt.parts:
            having = [pair for pair in best if digest in pair[1]]
            if not having:
                break
            best = having
            matched += size
        if matched > prompt.size * self._settings.cache_threshold:
            return [worker for worker, _ in best]
        sizes = {worker.id: seen.size for worker, seen in known}
        least = min(sizes.get(worker.id, 0) for worker in workers)
        return [worker for worker in workers if sizes.get(worker.id, 0) == least]

    def forget(self, worker: Worker) -> None:
        self._seen.pop(worker.id, None)

    def forget_all(self) -> None:
        self._seen.clear()
