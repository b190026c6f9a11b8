"""The plugin's hook, and the component ``"token_rows"``: it asks for routed experts, and records them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from router_core import BadRequest, Exchange, hookimpl
from router_core.router import Router
from slime_r3.cold_rows import RecordStore
from slime_r3.found_rows import FoundRows
from slime_r3.metrics import offer_metrics
from slime_r3.recorded_rows import RecordedRows, Shape
from slime_r3.settings import ALWAYS, Settings
from slime_sglang.facts import experts_shape
from slime_sglang.generation import generates

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn

__all__ = ["R3"]

_FIELD, _START = "return_routed_experts", "routed_experts_start_len"
_EXPERTS, _INDEXER = "routed_experts", "indexer_topk"
#: Paths of generations whose answers may have experts.
_GENERATING = frozenset(("/generate", "/v1/chat/completions", "/v1/completions"))
_CURE = "; --r3-shape LAYERS TOP_K sets the right size"
#: The note of an exchange whose client did not ask for routed experts.
_NOTE = "r3"


class R3:
    """Adds ``return_routed_experts: true`` to generations without the field, and keeps the rows of recorded turns.

    Requests and answers are not parsed here: the plugin ``radix_cache`` does that, and calls the methods of TokenRows.
    """

    def __init__(self, settings: Settings) -> None:
        self._injects = settings.inject == ALWAYS
        self._shape = settings.shape
        self._rows = {
            _EXPERTS: RecordedRows(_EXPERTS, settings.max_bytes, self._row_shape, _CURE),
            _INDEXER: RecordedRows(_INDEXER, settings.max_bytes, lambda: None),
        }

    @hookimpl
    def setup(self, router: Router) -> None:
        """Register the component for other plugins."""
        self._router = router
        self._pool = router.pool
        offer_metrics(router.components.find("metrics"), self._rows)
        router.components.register("token_rows", self)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Move rows that memory has no room for to the store of demoted trajectories, if there is one."""
        store: RecordStore | None = router.components.find("cold_store")
        if store is not None:
            for rows in self._rows.values():
                router.tasks.start_soon(rows.cold.run, store)
        yield

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        """Ask for routed experts."""
        if exchange.request.path == "/generate":
            for rows in self._rows.values():
                await rows.cold.room()
        await self.inject(exchange)

    async def inject(self, exchange: Exchange) -> None:
        """Add the field to the request, unless it has one. Requests without a JSON object stay as they are."""
        request = exchange.request
        if not self._injects or self._pool.passthrough or _is_declined(exchange):
            return
        if request.path not in _GENERATING or not generates(request):
            return
        try:
            if b'"return_routed_experts"' in request.body:
                payload = await self._router.read_json(exchange)
                if not isinstance(payload, dict) or _FIELD in payload:
                    return
            request.add_field(b'"return_routed_experts":true')
        except BadRequest:
            return  # the worker refuses the request itself
        exchange.notes[_NOTE] = True

    # The component "token_rows".

    def fields(
        self, exchange: Exchange, body: Mapping[str, Any], contexts: Sequence[Sequence[ConsumedTurn]]
    ) -> dict[str, Any]:
        """See TokenRows. A client that asks for rows itself gets those that it asks for."""
        if _FIELD in body:
            parent = exchange.parent
            is_own = _NOTE in exchange.notes or (parent is not None and _NOTE in parent.notes)
        else:
            is_own = self._injects and not _is_declined(exchange)
        if not is_own:
            return {}
        added: dict[str, Any] = {_FIELD: True}
        if body.get(_START) is None:
            start = min((self._rows[_EXPERTS].known(turns) for turns in contexts), default=0)
            if start:
                added[_START] = start
        return added

    def record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        """See TokenRows."""
        self._rows[_EXPERTS].record(turns, meta, start)
        if _INDEXER in meta:
            self._rows[_INDEXER].record(turns, meta, start)

    def find(self, name: str, turns: Sequence[ConsumedTurn], tokens: int) -> FoundRows | str:
        """See TokenRows."""
        return self._rows[name].find(turns, tokens)

    def forget(self, response: Hashable) -> None:
        """See TokenRows."""
        for rows in self._rows.values():
            rows.forget(response)

    def as_dict(self) -> dict[str, Any]:
        """See TokenRows."""
        return {name: rows.as_dict() for name, rows in self._rows.items()}

    def _row_shape(self) -> Shape | None:
        """Return the shape of a token's experts, from the flag or from a worker; None if nobody says it."""
        if self._shape is None:
            self._shape = next(filter(None, map(experts_shape, self._pool)), None)
        return self._shape


def _is_declined(exchange: Exchange) -> bool:
    """Return True if the client of a chat or completion, which ``exchange`` is a part of, had the field itself."""
    parent = exchange.parent
    return parent is not None and parent.request.path in _GENERATING and _NOTE not in parent.notes
