"""The component ``"token_rows"``: it keeps the rows of recorded turns (routed experts, and the indexer's choices)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyio.abc import TaskGroup

from router_core import Exchange
from router_core.router import Router
from slime_r3.asking import FIELD, Asking
from slime_r3.found_rows import FoundRows
from slime_r3.metrics import offer_metrics
from slime_r3.record_store import RecordStore
from slime_r3.recorded_rows import RecordedRows, Shape
from slime_r3.row_memory import RowMemory
from slime_r3.settings import Settings
from slime_sglang.facts import experts_shape

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn, RowNotes

__all__ = ["Recorder"]

_START = "routed_experts_start_len"
_EXPERTS, _INDEXER = "routed_experts", "indexer_topk"
_CURE = "; --r3-shape LAYERS TOP_K sets the right size"


class Recorder:
    """Keeps the rows of recorded turns.

    Implements slime_radix_cache.contracts.TokenRows; ``radix_cache`` calls its methods.
    """

    def __init__(self, settings: Settings, router: Router, asking: Asking) -> None:
        self._router = router
        self._asking = asking
        self._shape = settings.shape
        memory = RowMemory(settings.max_bytes)
        self._rows = {
            _EXPERTS: RecordedRows(_EXPERTS, memory, self._row_shape, _CURE),
            _INDEXER: RecordedRows(_INDEXER, memory, lambda: None),
        }
        offer_metrics(router.components.find("metrics"), self._rows)

    def keep_in(self, store: RecordStore, tasks: TaskGroup) -> None:
        """Start background tasks in ``tasks`` that move rows to ``store`` when memory has no room for them."""
        for rows in self._rows.values():
            tasks.start_soon(rows.cold.run, store)

    async def room(self) -> None:
        """Wait for room in memory for further rows, as :meth:`ColdRows.room` does."""
        await self._rows[_EXPERTS].cold.room()  # all kinds share memory and store

    async def inject(self, exchange: Exchange) -> None:
        """See TokenRows."""
        await self._asking.inject(exchange)

    def fields(
        self, exchange: Exchange, body: Mapping[str, Any], contexts: Sequence[Sequence[ConsumedTurn]]
    ) -> dict[str, Any]:
        """See TokenRows. Nothing is added if the client itself asks for rows, or declines them."""
        if not self._asking.is_own(exchange, body):
            return {}
        added: dict[str, Any] = {FIELD: True}
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

    def note_in(self, notes: RowNotes) -> None:
        """See TokenRows."""
        for rows in self._rows.values():
            rows.note_in(notes)

    def restore(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """See TokenRows."""
        self._rows[name].restore(response, content, records)

    async def save_of(self, responses: Sequence[Hashable]) -> None:
        """See TokenRows."""
        for rows in self._rows.values():
            await rows.cold.save_of(responses)

    async def save(self) -> None:
        """See TokenRows."""
        for rows in self._rows.values():
            await rows.cold.save()

    def as_dict(self) -> dict[str, Any]:
        """See TokenRows."""
        return {name: rows.as_dict() for name, rows in self._rows.items()}

    def _row_shape(self) -> Shape | None:
        """Return the shape of a token's experts, from the flag or from a worker; None if neither has it."""
        if self._shape is None:
            self._shape = next(filter(None, map(experts_shape, self._router.pool)), None)
        return self._shape
