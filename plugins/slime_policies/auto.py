"""Policy that keeps a session on its worker until another worker costs clearly less, by ``cache_aware``'s costs."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker
from slime_policies.cache_aware import CacheAware, Home
from slime_policies.kv_events import Blocks
from slime_policies.prompt_key import find_prompt
from slime_policies.settings import Settings
from slime_policies.worker_state import REQUEST, WorkerState

__all__ = ["Auto"]

logger = logging.getLogger(__name__)

_MAX_SESSIONS = 1 << 18
#: A session leaves a usable worker only if the move saves more than this cost, in tokens. Without a margin, sessions
#: would move to and fro.
_MARGIN = 4 * REQUEST
#: A session is expected to have as many further requests as it had so far, but no more than this number. With 8, moves
#: for small differences lengthened the times to the first token; with 1, a worker that joined late got few sessions.
_MOST_TURNS = 3


class _Session:
    """A session and its worker. ``state``: the state that the worker had at an earlier request of the session.

    ``size``: the number of bytes at the start of the next body that count as cached at the worker. It is the size of an
    earlier body of the session, but counts as 0 if the worker's cache was forgotten since then. ``turns``: requests of
    the session so far; they are counted anew if the session lost its worker because that worker could not be used.
    """

    __slots__ = ("size", "state", "turns", "worker")

    def __init__(self, worker: Worker, state: WorkerState, size: int) -> None:
        self.worker = worker
        self.state = state
        self.size = size
        self.turns = 0


class Auto:
    """Keeps sessions on their workers. ``cache_aware`` places a session's first request and requests without a session.

    A session moves when another worker costs clearly less, by the costs of ``cache_aware``. A worker that is new to the
    session usually lacks the whole conversation, apart from prefixes that it was sent in other requests. It prefills
    the missing part only once, so the expected requests of the session share the cost of that part. A session is
    expected to have as many further requests as it had so far, but three at most.

    With ``session_affinity`` ``strict``, the core keeps each session on its worker as long as that worker can be used.
    The core asks this policy only about other requests, and the policy chooses as ``cache_aware`` does. With either
    setting, no prompt is read until several workers are offered for one request.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.places_sessions = settings.session_affinity == "soft"
        self.moves = 0
        self._clock = clock
        self._cache_aware = CacheAware(settings, clock)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._has_choice = False

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        if not self._has_choice:
            self._has_choice = len(workers) > 1
        session = exchange.session if self.places_sessions else None
        if session is None:
            return self._cache_aware(exchange, workers) if self._has_choice else workers[0]
        known = self._sessions.get(session)
        if known is None or known.worker not in workers:
            worker = self._cache_aware(exchange, workers) if self._has_choice else workers[0]
            known = _Session(worker, self._cache_aware.state(worker), len(exchange.request.body))
            self._sessions[session] = known
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        elif self._has_choice:
            self._go_on(exchange, workers, known)
        else:
            known.size = max(known.size, len(exchange.request.body))
        known.turns += 1
        self._sessions.move_to_end(session)
        return known.worker

    def _go_on(self, exchange: Exchange, workers: Sequence[Worker], known: _Session) -> None:
        """Let a session keep its worker, or move the session to another worker."""
        body = exchange.request.body
        start, per_token = find_prompt(body)
        if start is None:
            return
        home, state = known.worker, known.state
        if not state.bit:
            state = known.state = self._cache_aware.state(home)
            known.size = 0
        lacking = max(0, len(body) - max(start, known.size)) / per_token
        known.size = len(body)
        now = self._clock()
        load = state.load(home, now)
        if load <= _MARGIN or load - REQUEST * min([each.in_flight for each in workers]) <= _MARGIN:
            state.add(home, lacking, now)
            return
        turns = min(known.turns, _MOST_TURNS)
        chosen = self._cache_aware.choose(exchange, workers, Home(home, lacking, _MARGIN, turns))
        if chosen is not home:
            self.moves += 1
            logger.debug("session %r moves from %s to %s", exchange.session, home.name, chosen.name)
            known.worker, known.state = chosen, self._cache_aware.state(chosen)

    @property
    def blocks(self) -> Blocks | None:
        """The blocks that workers have according to their KV events; None without ``--kv-events``."""
        return self._cache_aware.blocks

    def expects(self, exchange: Exchange) -> bool:
        """See :class:`slime_policies.policy.Selective`."""
        return self._cache_aware.expects(exchange)

    def answered(self, exchange: Exchange, prompt_tokens: int, cached_tokens: int) -> None:
        """See :class:`slime_policies.policy.Corrected`."""
        self._cache_aware.answered(exchange, prompt_tokens, cached_tokens)

    def forget(self, worker: Worker) -> None:
        """See :class:`slime_policies.policy.Remembering`. Sessions keep their workers."""
        self._cache_aware.forget(worker)

    def forget_all(self) -> None:
        """See :class:`slime_policies.policy.Remembering`. Sessions keep their workers."""
        self._cache_aware.forget_all()
