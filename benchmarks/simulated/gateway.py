"""``cache_aware`` of the SGLang gateway 0.3.2, reimplemented for the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker

__all__ = ["GatewayCacheAware"]

_CUT = 64
_BALANCE_ABS, _BALANCE_REL, _CACHE = 64, 1.5, 0.3
_BEFORE, _BEHIND = b'"text": "', b'", "sampling_params"'


class GatewayCacheAware:
    """Chooses a worker by the gateway's rules, with its defaults.

    - If the largest load is more than 64 requests above the smallest, and more than 1.5 times the smallest: the worker
      with the smallest load.
    - Else, if workers have seen more than 0.3 of the prompt, from its beginning: the worker that was the first to see
      the whole of this part.
    - Else the worker with the smallest tree.

    The gateway's tree has characters. Here a tree has parts of 64 bytes, the size of a block of the simulated caches.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[Worker, None]] = {}
        self._sizes: dict[Worker, int] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        body = exchange.request.body
        text = body[body.index(_BEFORE) + len(_BEFORE) : body.rindex(_BEHIND)]
        digests, digest = [], 0
        for begin in range(0, len(text), _CUT):
            digest = hash((digest, text[begin : begin + _CUT]))
            digests.append(digest)
        chosen = self._choose(digests, workers)
        for digest in digests:
            seen = self._seen.setdefault(digest, {})
            if chosen not in seen:
                seen[chosen] = None
                self._sizes[chosen] = self._sizes.get(chosen, 0) + _CUT
        return chosen

    def _choose(self, digests: Sequence[int], workers: Sequence[Worker]) -> Worker:
        loads = [worker.in_flight for worker in workers]
        most, fewest = max(loads), min(loads)
        if most - fewest > _BALANCE_ABS and most > fewest * _BALANCE_REL:
            return min(workers, key=lambda worker: worker.in_flight)
        matched, chosen = 0, None
        for digest in digests:
            if digest not in self._seen:
                break
            matched += 1
            chosen = next(iter(self._seen[digest]))
        if chosen is not None and matched > _CACHE * len(digests):
            return chosen
        return min(workers, key=lambda worker: self._sizes.get(worker, 0))
