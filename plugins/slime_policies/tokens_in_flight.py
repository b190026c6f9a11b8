"""Loads of workers, measured as the tokens of their requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.request_tokens import MeanLength, completions_of, limit_of, prompt_tokens_of
from slime_sglang.generation import generates

__all__ = ["CountedRequest", "TokensInFlight", "change_total"]

#: The weight of a token of a waiting prompt on a regular worker; a token to decode counts 1. Among 0, 0.05, 0.1, 0.25
#: and 1, this weight gave the best TTFT for unrelated prompts. GRPO groups do better with a smaller weight
#: (docs/plugins/policies.md).
PROMPT_WEIGHT = 0.25


class CountedRequest:
    """Tokens of one request at ``worker``. ``prompt``: tokens to prefill.

    ``prompt`` becomes 0 at the answer's first byte, except in ``EngineLoads``. ``answer``: tokens to decode.
    ``single``: the answer is one completion. ``at``: the time of the choice.
    """

    __slots__ = ("answer", "at", "prompt", "single", "worker")

    def __init__(self, worker: Worker, prompt: int, answer: int, at: float, *, single: bool) -> None:
        self.worker = worker
        self.prompt = prompt
        self.answer = answer
        self.single = single
        self.at = at


class TokensInFlight:
    """Tokens of each worker's generations: waiting prompts, and tokens to decode.

    A request counts from the choice of its worker to the end of its exchange. The prompt of a request waits until the
    first byte of the answer. The load of a prefill worker is its waiting prompts. The load of a decode worker is its
    tokens to decode. The load of a regular worker is a weighted sum of both. If a request has no limit, each of its
    completions counts as the mean length of the last completions.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.mean_length = MeanLength()
        self._requests: dict[Exchange, CountedRequest] = {}
        self._prompts: dict[str, int] = {}
        self._answers: dict[str, int] = {}

    def least(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        """Return the least loaded worker, and count ``exchange`` there. Ties go to the fewest requests in flight."""
        loads = self.loads(workers)
        least = min(loads)
        tied = [worker for worker, load in zip(workers, loads, strict=True) if load == least]
        chosen = tied[0] if len(tied) == 1 else least_in_flight(tied)
        self.count(exchange, chosen)
        return chosen

    def loads(self, workers: Sequence[Worker]) -> list[float]:
        """Return the load of each of ``workers``."""
        return [self._load(worker) for worker in workers]

    def _load(self, worker: Worker) -> float:
        prompts, answers = self.tokens_of(worker)
        match worker.server.worker_type:
            case "prefill":
                return prompts
            case "decode":
                return answers
        return PROMPT_WEIGHT * prompts + answers

    def tokens_of(self, worker: Worker) -> tuple[int, int]:
        """Return the tokens of waiting prompts at ``worker``, and the tokens that it has to decode."""
        return self._prompts.get(worker.id, 0), self._answers.get(worker.id, 0)

    def count(self, exchange: Exchange, worker: Worker) -> None:
        """Count ``exchange``, if it is a generation, at ``worker`` and nowhere else."""
        known = self._requests.get(exchange)
        if known is not None:
            if known.worker is worker and known.prompt:
                return
            self._remove(known)
        elif generates(exchange.request):
            exchange.on_close(partial(self._end, exchange))
        else:
            return
        body = exchange.request.body
        limit, completions = limit_of(body), completions_of(body)
        answer = int(self.mean_length.tokens) if limit is None else limit
        request = self._requests[exchange] = CountedRequest(
            worker, prompt_tokens_of(body), completions * answer, self.clock(), single=completions == 1
        )
        self._add(request)

    def begin(self, exchange: Exchange) -> None:
        """Stop counting the prompt of ``exchange``: the first byte of its answer has come."""
        request = self._requests.get(exchange)
        if request is not None and request.prompt:
            self._remove(request)
            request.prompt = 0
            self._add(request)

    def is_single(self, exchange: Exchange) -> bool:
        """Return True when ``exchange`` is counted, and its answer is one completion."""
        request = self._requests.get(exchange)
        return request is not None and request.single

    def _end(self, exchange: Exchange) -> None:
        self._remove(self._requests.pop(exchange))

    def _add(self, request: CountedRequest) -> None:
        change_total(self._prompts, request.worker.id, request.prompt)
        change_total(self._answers, request.worker.id, request.answer)

    def _remove(self, request: CountedRequest) -> None:
        change_total(self._prompts, request.worker.id, -request.prompt)
        change_total(self._answers, request.worker.id, -request.answer)


def change_total(totals: dict[str, int], name: str, by: int) -> None:
    """Add ``by`` to the total ``name``. A total of 0 is dropped, so workers that have left take no memory."""
    total = totals.get(name, 0) + by
    if total:
        totals[name] = total
    else:
        totals.pop(name, None)
