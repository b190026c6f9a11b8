"""Recording of the rows that engines send for each token, such as routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from router_core.exchange import Exchange
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.consumed_turns import consumed_turns
from slime_radix_cache.index.segments import Context, Response
from slime_radix_cache.index.trajectories import Trajectories

if TYPE_CHECKING:
    from slime_radix_cache.contracts import FoundRows, TokenRows

__all__ = ["RowRecorder"]

_START = "routed_experts_start_len"


class _Turn(Protocol):
    """A prompt that continues ``context``. ``row_start``: the first token whose row the engine is to send."""

    context: Context
    row_start: int


class RowRecorder:
    """Records rows in ``store``, the component ``"token_rows"``. ``store`` is None if no plugin keeps rows."""

    def __init__(self, trajectories: Trajectories) -> None:
        self._trajectories = trajectories
        self.store: TokenRows | None = None

    def keep_in(self, store: TokenRows | None, cold: ColdTrajectories | None) -> None:
        """Use ``store`` from now on, and let it forget each response that is removed for good.

        A demoted response has only moved to another store, so its rows stay. ``cold``: the demoted trajectories, with
        notes about the rows that earlier runs of the router recorded; None if nothing is ever demoted.
        """
        self.store = store
        if store is None:
            return
        if cold is not None and cold.demotion is not None:
            cold.demotion.gone = store.forget
            cold.rows.connect(store)
        else:
            self._trajectories.response_removed = store.forget

    def asked(
        self,
        exchange: Exchange,
        body: dict[str, Any],
        document: dict[str, Any] | None,
        turns: Sequence[_Turn],
    ) -> dict[str, Any] | None:
        """Return ``document`` with the fields that ask the engine for the rows of ``turns``; set their ``row_start``.

        ``document``: the changed ``body``, None if ``body`` is unchanged. Returns None if ``body`` needs no change.
        """
        if self.store is not None:
            fields = self.store.fields(exchange, body, [consumed_turns(turn.context) for turn in turns])
            if any(body.get(name) != value for name, value in fields.items()):
                document = {**(document if document is not None else body), **fields}
        start = (document if document is not None else body).get(_START)
        for turn in turns:
            turn.row_start = start if type(start) is int else 0
        return document

    def record(self, response: Response, meta: Mapping[str, Any], start: int) -> None:
        """Record the rows in ``meta``, the ``meta_info`` of the answer recorded as ``response``.

        ``start``: the first token whose row the engine was asked for.
        """
        if self.store is not None and response.is_fact:
            self.store.record(consumed_turns((response, len(response))), meta, start)

    def find(self, name: str, context: Context, tokens: int) -> FoundRows | str:
        """Find the rows ``name`` of the first ``tokens - 1`` tokens of ``context``, or return why they are unknown."""
        if self.store is None:
            return "not_recorded"
        return self.store.find(name, consumed_turns(context), tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes of the store, ready for JSON; empty without a store."""
        return {"token_rows": self.store.as_dict()} if self.store is not None else {}
