"""The components that this plugin shares with others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from slime_radix_cache.row_contracts import ConsumedTurn, FoundRows, RowNotes, TokenRows

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
    "SideRecords",
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


class SideRecords(Protocol):
    """Records of chats in the store of demoted trajectories; the component ``"side_records"``.

    A record is the answer to a request of ``session``, None for a request without one. Two digests lead to it:
    ``name``, and ``place``, that of the session and its question. ``parent``: the key of the record that it continues.
    """

    @property
    def is_on(self) -> bool:
        """True if there is a store that outlives the router."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def add(
        self, session: str | None, name: bytes, place: bytes, parent: bytes, content: Callable[[], bytes]
    ) -> bytes:
        """Return the key of a new record. It is saved when an answer of its session is demoted, and at the end.

        ``content()`` is called then, and always returns the same. ``parent``: empty for none.
        """

    def save_soon(self, key: bytes) -> None:
        """Save the record of ``key`` now: its turn is not in memory any more."""

    async def look(self) -> None:
        """Read what other routers have noted. Raises HTTPError."""

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the keys of records under ``names`` and places, oldest first.

        Without a record when another one of its session at its place may be lost: that one may be meant.
        """

    def has_answers(self, place: bytes) -> bool:
        """Return True if :meth:`find` finds a record at ``place``. O(1)."""

    def has_later_elsewhere(self, key: bytes) -> bool:
        """Return True if another router may have a later answer to the question of the record ``key``."""

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the saved records of ``keys``, None for a lost one. Raises HTTPError."""

    def is_own(self, key: bytes) -> bool:
        """Return True if this run of the router recorded ``key``."""

    async def ask_again(self, place: bytes) -> None:
        """Note that ``place`` may get several records, before the second one is asked for."""

    def has_lost(self, session: str | None) -> bool:
        """Return True if something of ``session`` is lost; None: of requests without a session."""
