"""The contracts of the plugin that keeps the rows of tokens; part of the contracts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from router_core.exchange import Exchange

__all__ = ["ConsumedTurn", "FoundRows", "RowNotes", "TokenRows"]


class ConsumedTurn(NamedTuple):
    """One response in a context. Places and lengths are in tokens.

    ``response``: its identity, which outlives its demotion. ``prompt``: equal for responses to the same prompt.
    ``start``: place of its first token.
    ``length``: its tokens, of which the context keeps the first ``kept``.
    ``versions``: ``(version, number of tokens)`` of consecutive runs. ``adapter``: the LoRA adapter that sampled it.
    """

    response: Hashable
    prompt: Hashable
    start: int
    length: int
    kept: int
    versions: tuple[tuple[str | None, int], ...]
    adapter: str | None


class FoundRows(Protocol):
    """Rows that are known, and may be read. ``shape``: ``[tokens, layers, top_k]`` or ``[tokens, row size]``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    async def read(self) -> npt.NDArray[np.integer[Any]] | str:
        """Return the rows, or why they are lost. Rows in a store are read into the returned array. Raises HTTPError."""


class RowNotes(Protocol):
    """The store's log, in which what leads to stored rows outlives the router."""

    def add(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Note that the rows ``name`` of ``response`` are in ``records``: keys, each with a size in bytes.

        A later note replaces it. ``content``: plain values (numbers, strings, tuples, None), given back to
        :meth:`TokenRows.restore` as they are. None as response: a fact about all rows of this name.
        """


class TokenRows(Protocol):
    """Store of the rows that engines tell for each token, such as routed experts; the component ``"token_rows"``.

    Another plugin offers it. Turns are those of one context, first one first.
    """

    async def inject(self, exchange: Exchange) -> None:
        """Ask for rows in the body of ``exchange``, a generation of any API, unless the client did or declined it."""

    def fields(
        self, exchange: Exchange, body: Mapping[str, Any], contexts: Sequence[Sequence[ConsumedTurn]]
    ) -> dict[str, Any]:
        """Return the fields to add to ``body``, a ``/generate``, to get the rows that are not known.

        ``contexts``: what each of its prompts continues.
        """

    def record(self, turns: Sequence[ConsumedTurn], meta: Mapping[str, Any], start: int) -> None:
        """Record the rows in ``meta``, the ``meta_info`` of the answer that is the last of ``turns``.

        ``start``: the first token whose row was asked for.
        """

    def find(self, name: str, turns: Sequence[ConsumedTurn], tokens: int) -> FoundRows | str:
        """Find the rows ``name`` of the first ``tokens - 1`` tokens of the context; or return why they are not known.

        ``name``: that of the field in ``meta_info``. O(turns); safe in any thread.
        """

    def forget(self, response: Hashable) -> None:
        """Drop the rows of ``response``, which is gone for good. A demoted response keeps its rows."""

    def note_in(self, notes: RowNotes) -> None:
        """Add all that is put into the store to ``notes`` from now on."""

    def restore(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """Take what an earlier run or another router has noted, perhaps for the second time. See RowNotes.

        Rows that are known stay, unless the note has more.
        """

    async def save_of(self, responses: Sequence[Hashable]) -> None:
        """Put the rows of ``responses``, which are about to be demoted, into the store; they stay if that fails."""

    async def save(self) -> None:
        """Put all rows into the store. This is the last call."""

    def as_dict(self) -> dict[str, Any]:
        """Return sizes and counters, ready for JSON."""
