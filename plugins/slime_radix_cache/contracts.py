"""The components that this plugin shares with others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from router_core.exchange import Exchange

__all__ = [
    "ConsumedTurn",
    "FoundRows",
    "RecordedTokens",
    "RowNotes",
    "SessionList",
    "SessionPage",
    "SessionSummary",
    "SessionTurns",
    "TextEncoder",
    "TokenCounts",
    "TokenRows",
    "Turn",
    "TurnContext",
    "TurnRecord",
]


class TextEncoder(Protocol):
    """Tokenizer that does not block the event loop and caches common texts; the component ``"encoder"``."""

    async def encode(self, text: str, *, begins: bool, client: str | None = None) -> bytes:
        """Return the packed int32 ids of ``text``. ``begins``: no tokens come before it.

        ``client``: see FairTurns. Raises BadRequest if the text is too long, and the tokenizer's own errors.
        """
        ...

    @property
    def max_characters(self) -> int:
        """Maximum length of a text."""
        ...


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


class TokenCounts(NamedTuple):
    """Numbers of tokens of one ``/generate``, over all its sequences.

    ``reused_tokens``: those of ``prompt_tokens`` that were recorded before. ``completion_tokens``: None if the answer
    to a sequence is not recorded.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int | None


class RecordedTokens(Protocol):
    """The tokens of ``/generate`` requests, and verdicts on them; the component ``"verdicts"``.

    Call this after the reply has been read, and before ``exchange`` is closed, or in its ``on_close``.
    """

    def counts(self, exchange: Exchange) -> TokenCounts | None:
        """Return the numbers of tokens; None for an exchange that was passed on untouched."""
        ...

    def of(self, exchange: Exchange) -> Sequence[str | None]:
        """Return, for each sequence, the reason why its tokens are not exact; None if they are."""
        ...


class SessionSummary(NamedTuple):
    """A session in a list. ``responses``: kept ones; ``tokens``: sampled ones in them.

    ``weight_versions``: of the tokens, in order, without repetitions in a row. ``is_complete``: nothing of it is lost.
    """

    name: str
    responses: int
    tokens: int
    weight_versions: tuple[str | None, ...]
    is_complete: bool


class SessionPage(NamedTuple):
    """A part of the list of sessions. ``has_more``: sessions follow. ``is_cut``: older ones were not searched."""

    sessions: Sequence[SessionSummary]
    has_more: bool
    is_cut: bool


class SessionList(Protocol):
    """The recorded sessions; the component ``"session_list"``."""

    def __len__(self) -> int:
        """Return the number of sessions with a kept response."""
        ...

    def page(self, search: str, offset: int, limit: int) -> SessionPage:
        """Return sessions whose names contain ``search``, newest first, without the first ``offset`` of them.

        O(offset and the responses of the returned ones); with ``search`` at most 100,000 names are compared.
        """
        ...


class Turn(Protocol):
    """One response. ``before``: number of the turn that it continues; ``finish_reason`` None: no end was seen.

    ``prompt``: the same for responses to one prompt.
    """

    @property
    def number(self) -> int: ...
    @property
    def before(self) -> int | None: ...
    @property
    def prompt(self) -> Hashable: ...
    @property
    def tokens(self) -> int: ...
    @property
    def finish_reason(self) -> dict[str, Any] | None: ...


class TurnRecord(Protocol):
    """Tokens of a context. ``spans``: runs of ``(weight version, count)``, with version -1 for tokens of a prompt."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.int8]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float64]: ...
    @property
    def spans(self) -> tuple[tuple[str | int | None, int], ...]: ...


class TurnContext(Protocol):
    """All tokens up to the end of one turn. ``spans``: ``(number, start, end, is_whole)`` of the session's turns in it.

    ``is_whole``: the client kept the whole response. ``sampled``: ``(key, start, end)`` of all responses in the
    context; a response has the same key in all contexts.
    """

    @property
    def record(self) -> TurnRecord: ...
    @property
    def spans(self) -> tuple[tuple[int, int, int, bool], ...]: ...
    @property
    def sampled(self) -> tuple[tuple[Hashable, int, int], ...]: ...
    @property
    def inexact_reason(self) -> str | None: ...


class SessionTurns(Protocol):
    """The turns of each recorded session; the component ``"session_turns"``."""

    async def load(self, session: str) -> None:
        """Put the turns of ``session`` that were moved out of memory back into it. Raises HTTPError.

        Call it right before the other methods, without an ``await`` between them.
        """
        ...

    def turns(self, session: str) -> Sequence[Turn]:
        """Return the turns of ``session``, oldest first."""
        ...

    def expect(self, session: str) -> Sequence[Turn]:
        """Return the turns of ``session``, at least one. Raises SessionNotFound; its message says why there is none."""
        ...

    def context(self, turn: Any, turns: Any) -> TurnContext:
        """Return the context of ``turn``, one of ``turns``. Any thread may call it."""
        ...

    def rows(self, name: str, turn: Any, tokens: int) -> FoundRows | str | None:
        """Find the rows ``name`` of the first ``tokens - 1`` tokens up to ``turn``; or return why they are not known.

        None: no plugin records rows. Any thread may call it.
        """
        ...

    def text(self, turn: Any) -> str:
        """Return the text that the client got in ``turn``. To be called in the event loop's thread only."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens spelt out."""
        ...

    def has_lost(self, session: str) -> bool:
        """Return True when something of ``session`` is lost, or could not be recorded as exact."""
        ...

    def forget(self, session: str) -> None:
        """Evict the responses of ``session``."""
        ...


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
        """Take what an earlier run, or another router, has noted, perhaps once more. Rows that are known stay."""

    async def save(self) -> None:
        """Put all rows into the store. To be called at the end; no method of others is called any more then."""

    def as_dict(self) -> dict[str, Any]:
        """Return sizes and counters, ready for JSON."""
