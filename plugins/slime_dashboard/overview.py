"""Data of the first page: the fleet, its traffic, the cache, and the list of sessions."""

from __future__ import annotations

import logging
import time
from collections import deque
from importlib.metadata import version
from typing import TYPE_CHECKING

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from router_core import BadRequest, WeightUpdate
from router_core.router import Router
from router_core.routes import JSON, ControlRoute
from slime_dashboard.fleet import fleet
from slime_dashboard.history import History
from slime_dashboard.numbers import Numbers

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionList

__all__ = ["Overview"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0
#: Samples of one hour.
_SAMPLES = 720
_MAX_UPDATES = 100
_SESSIONS = 20
#: Largest number of characters in a search: no name of a session is longer.
_MAX_SEARCH = 1024
_MAX_OFFSET = 1_000_000
_FRESH = {"cache-control": "no-store"}


class Overview:
    """Answers data requests of the page. :meth:`watch` must run, since it adds the samples of the history."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._numbers = Numbers(router)
        self._updates: deque[tuple[float, str]] = deque(maxlen=_MAX_UPDATES)
        self._started_at = time.time()
        self._history: History | None = None

    @property
    def _sessions(self) -> SessionList | None:
        found: SessionList | None = self._router.components.find("session_list")
        return found

    def routes(self, path: str) -> list[BaseRoute]:
        """Return the routes below ``path``."""
        return [
            ControlRoute(f"{path}/overview", self._overview, methods=["GET"]),
            ControlRoute(f"{path}/sessions", self._session_page, methods=["GET"]),
        ]

    def updated(self, update: WeightUpdate) -> None:
        """Note that the fleet has new weights."""
        self._updates.append((round(time.time(), 1), update.version))

    def begin(self) -> None:
        """Begin the history, if there are metrics. Call this after all plugins have registered their metrics."""
        if self._numbers.has_traffic:
            self._history = History(_SAMPLES, self._numbers.cumulative, time.monotonic, time.time)

    async def watch(self) -> None:
        """Add a sample to the history every five seconds, without end; return at once without metrics."""
        while self._history is not None:
            await anyio.sleep(_INTERVAL_S)
            try:
                self.sample()
            except Exception:  # an error in this task would end the router
                logger.exception("the dashboard has no sample of the last %g s", _INTERVAL_S)

    def sample(self) -> None:
        """Add a sample to the history, if there is one."""
        if self._history is not None:
            self._history.sample(self._in_flight(), self._waiting())

    def _in_flight(self) -> int:
        return int(self._numbers.one("slime_requests_in_flight") or 0)

    def _waiting(self) -> float:
        return sum(
            self._numbers.one(name) or 0 for name in ("slime_requests_queued", "slime_requests_paused")
        )

    async def _overview(self, request: Request) -> Response:
        since = _number(request, "since", float("inf"))
        one, by_label, sessions = self._numbers.one, self._numbers.by_label, self._sessions
        paused = one("slime_generation_paused")
        hits = by_label("slime_cache_prompts_total")
        return JSON(
            {
                "version": version("slime-router"),
                "uptime_s": round(time.time() - self._started_at, 1),
                "fleet": fleet(self._router, by_label("smg_worker_cb_state")),
                "weights": {
                    "version": self._router.weights.current,
                    "age_s": one("slime_weight_version_age_seconds"),
                    "updates": list(self._updates),
                },
                "paused": None if paused is None else bool(paused),
                "waiting": {"slot": one("slime_requests_queued"), "pause": one("slime_requests_paused")},
                "slots": {"held": one("slime_slots_held"), "limit": one("slime_slots")},
                "history": self._history.since(since) if self._history is not None else None,
                "interval_s": _INTERVAL_S,
                "cache": None
                if hits is None
                else {
                    "prompts": hits,
                    "tokens": by_label("slime_prompt_tokens_total"),
                    "kept_tokens": one("slime_cache_tokens"),
                    "kept_bytes": one("slime_cache_bytes"),
                },
                "exactness": None
                if hits is None
                else {
                    "generated": by_label("slime_generations_total"),
                    "retrieved": by_label("slime_retrieved_answers_total"),
                    "untouched": by_label("slime_untouched_generations_total"),
                    "unrecorded": by_label("slime_unrecorded_answers_total"),
                },
                "sessions": None if sessions is None else len(sessions),
            },
            headers=_FRESH,
        )

    async def _session_page(self, request: Request) -> Response:
        offset, sessions = int(_number(request, "offset", _MAX_OFFSET)), self._sessions
        search = request.query_params.get("search", "")
        if len(search) > _MAX_SEARCH:
            raise BadRequest(f"search: wanted at most {_MAX_SEARCH} characters, got {len(search)}")
        if sessions is None:
            return JSON({"recorded": False, "sessions": [], "total": 0}, headers=_FRESH)
        page = sessions.page(search, offset, _SESSIONS)
        return JSON(
            {
                "recorded": True,
                "sessions": [
                    {
                        "name": each.name,
                        "responses": each.responses,
                        "tokens": each.tokens,
                        "weight_versions": each.weight_versions,
                        "complete": each.is_complete,
                    }
                    for each in page.sessions
                ],
                "total": len(sessions),
                "has_more": page.has_more,
                "is_cut": page.is_cut,
                "size": _SESSIONS,
            },
            headers=_FRESH,
        )


def _number(request: Request, name: str, most: float) -> float:
    """Return the parameter ``name`` of the query, from 0 to ``most``; 0 if it is not given. Raises BadRequest."""
    text = request.query_params.get(name, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise BadRequest(f"{name}: wanted a number from 0 to {most:g}, got {text[:40]!r}")
    return number
