"""Contracts with the plugin that keeps rows: values that engines send for each token, such as routed experts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from slime_rows.rows import FoundRows

if TYPE_CHECKING:
    from router_core.exchange import Exchange

__all__ = ["ConsumedTurn", "FoundRows", "RowNotes", "TokenRows"]


class ConsumedTurn(NamedTuple):
    """One response in a context. Positions and lengths are in tokens.

    ``response``: its identity, the same before and after the response is moved to a store.
    ``prompt``: equal for responses to the same prompt.
    ``start``: position of its first token.
    ``length``: number of its tokens. ``kept``: how many of these, from the first on, the context has.
    ``versions``: the weight versions that sampled it, in order, each with its number of tokens.
    ``adapter``: the LoRA adapter that sampled it.
    """

    response: Hashable
    prompt: Hashable
    start: int
    length: int
    kept: int
    versions: tuple[tuple[str | None, int], ...]
    adapter: str | None


class RowNotes(Protocol):
    """Notes about stored rows in the store's log: with them, a later run of the router finds the rows."""

    def add(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Note that the rows ``name`` of ``response`` are in ``records``: keys, each with a size in bytes.

        A later note about the same rows replaces this one. ``content``: plain values (numbers, strings, tuples, None)
        that :meth:`TokenRows.restore` gets back unchanged. If ``response`` is None, the note is about the rows
        ``name`` of all responses; it may say how large a row is, for example.
        """

    def drop(self, keys: Sequence[bytes]) -> None:
        """Note that the records of ``keys`` are not needed any more, then let the store forget them.

        Without the note, a later run of the router, or another router, would take these records for lost.
        """


class TokenRows(Protocol):
    """Store of the rows that engines send for each token, such as routed experts; the component ``"token_rows"``.

    Another plugin offers it. ``turns``: the turns of one context, in order. *Stored* rows are in the component
    ``"cold_store"``.
    """

    async def inject(self, exchange: Exchange) -> None:
        """Make the request of ``exchange`` ask for rows, unless the client asked for them or declined them.

        The request may be of any API.
        """

    def fields(
        self, exchange: Exchange, body: Mapping[str, Any], contexts: Sequence[Sequence[ConsumedTurn]]
    ) -> dict[str, Any]:
        """Return the fields to add to ``body``, the body of a ``/generate`` request, to get the rows not known yet.

        ``contexts``: for each prompt of the request, the turns that it continues.
        """

    def record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        """Record the rows in ``meta``: the ``meta_info`` of the answer that became the last of ``turns``.

        ``start``: the first token whose row the engine was asked for.
        """

    def find(self, name: str, turns: Sequence[ConsumedTurn], tokens: int) -> FoundRows | str:
        """Find the rows ``name`` of the first ``tokens - 1`` tokens of the context, or return why they are unknown.

        ``name``: the name of the field in ``meta_info``. O(turns); safe in any thread.
        """

    def forget(self, response: Hashable) -> None:
        """Drop the rows of ``response``, which is gone for good. A response that moved to a store keeps its rows."""

    def note_in(self, notes: RowNotes) -> None:
        """From now on, add a note to ``notes`` for all rows that are stored."""

    def restore(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Learn a note of an earlier run or of another router. The same note may come twice. See RowNotes.

        Known rows stay, unless the note has more rows.
        """

    async def save_of(self, responses: Sequence[Hashable]) -> None:
        """Store the rows of ``responses``, which leave memory soon. If that fails, the rows stay in memory."""

    async def save(self) -> None:
        """Store all rows. No other call follows."""

    def as_dict(self) -> dict[str, Any]:
        """Return sizes and counters, ready for JSON."""
