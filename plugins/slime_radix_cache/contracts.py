"""The components that this plugin shares with other plugins."""

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
        """Return the packed int32 ids of ``text``. ``begins``: no tokens come before the text.

        ``client``: the client of the request; clients get threads in rotation. Raises BadRequest if the text is too
        long, and the tokenizer's own errors.
        """
        ...

    @property
    def max_characters(self) -> int:
        """Maximum length of a text."""
        ...


class TokenCounts(NamedTuple):
    """Numbers of tokens of one ``/generate`` request, over all its sequences.

    ``reused_tokens``: prompt tokens that were recorded before. ``completion_tokens``: None if the answer of any
    sequence is not recorded.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int | None


class RecordedTokens(Protocol):
    """Numbers of the tokens of ``/generate`` requests, and verdicts: reasons why the tokens are not exact.

    The component ``"verdicts"``. Call the methods after the reply has been read, at the latest in a callback of
    ``exchange.on_close``.
    """

    def counts(self, exchange: Exchange) -> TokenCounts | None:
        """Return the numbers of tokens; None if the request was passed on untouched."""
        ...

    def of(self, exchange: Exchange) -> Sequence[str | None]:
        """Return for each sequence the reason why its tokens are not exact, or None if they are exact.

        The result is empty if the request was passed on untouched.
        """
        ...


class SessionSummary(NamedTuple):
    """A session in a list. ``responses``: number of kept responses; ``tokens``: number of tokens sampled in them.

    ``weight_versions``: the versions that sampled these tokens, in order, without repetitions in a row.
    ``is_complete``: nothing of the session is lost.
    """

    name: str
    responses: int
    tokens: int
    weight_versions: tuple[str | None, ...]
    is_complete: bool


class SessionPage(NamedTuple):
    """A part of the list of sessions. ``has_more``: more sessions follow. ``is_cut``: older ones were not searched."""

    sessions: Sequence[SessionSummary]
    has_more: bool
    is_cut: bool


class SessionList(Protocol):
    """The recorded sessions; the component ``"session_list"``."""

    def __len__(self) -> int:
        """Return the number of sessions with a kept response."""
        ...

    def page(self, search: str, offset: int, limit: int) -> SessionPage:
        """Return at most ``limit`` sessions whose names contain ``search``, newest first; skip the first ``offset``.

        O(offset + the responses of the returned sessions). If ``search`` is not empty, only the latest 100,000 names
        are searched.
        """
        ...


class Turn(Protocol):
    """One response. ``before``: the number of the session's turn that this turn continues; None if there is none.

    ``prompt``: equal for responses to the same prompt. ``finish_reason``: None if the response's end was not seen, or
    if the engine's value is not a JSON object. ``is_running``: the response is streamed now, and its end has not come.
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
    @property
    def is_running(self) -> bool: ...


class TurnRecord(Protocol):
    """Tokens of a context. ``spans``: runs of tokens as ``(weight version, count)``; -1 where the loss mask is 0."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.int8]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float64]: ...
    @property
    def spans(self) -> tuple[tuple[str | int | None, int], ...]: ...


class TurnContext(Protocol):
    """All tokens up to the end of one turn. ``start`` and ``end`` below are positions in these tokens.

    ``spans``: ``(number, start, end, is_whole)`` of each turn of the session in this context. ``is_whole``: the
    client kept the whole response. ``sampled``: ``(key, start, end)`` of each response in the context, also of other
    sessions. Equal keys mean the same response.
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
        """Load the turns of ``session`` that are only in a store. Raises HTTPError.

        Call this right before :meth:`turns` or :meth:`expect`, without an ``await`` in between. The turns that those
        return can be given to :meth:`context` and :meth:`rows` even after the session is moved to the store or deleted.
        """
        ...

    def turns(self, session: str) -> Sequence[Turn]:
        """Return the turns of ``session``, oldest first."""
        ...

    def expect(self, session: str) -> Sequence[Turn]:
        """Return the turns of ``session``. Raises SessionNotFound if there is none; the message says why."""
        ...

    def context(self, turn: Any, turns: Any) -> TurnContext:
        """Return the context of ``turn``, one of ``turns``. Any thread may call this."""
        ...

    def rows(self, name: str, turn: Any, tokens: int) -> FoundRows | str | None:
        """Find the rows ``name`` of the first ``tokens - 1`` tokens in the context of ``turn``.

        Returns the reason if the rows are unknown, and None if no plugin records rows. Rows are values for each token,
        such as routed experts. Any thread may call this.
        """
        ...

    def text(self, turn: Any) -> str:
        """Return the text that the client got in ``turn``.

        Only the event loop's thread may call this, without an ``await`` since :meth:`load`.
        """
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, including the text of special tokens."""
        ...

    def has_lost(self, session: str) -> bool:
        """Return True if something of ``session`` is lost, or could not be recorded as exact."""
        ...

    def forget(self, session: str) -> None:
        """Evict the responses of ``session``."""
        ...


class SideRecords(Protocol):
    """Records of chats in the store of demoted trajectories (moved out of memory); the component ``"side_records"``.

    A record is the answer to a chat request of ``session`` (None: the request had no session). Two digests lead to
    the record. ``name`` is the digest of the conversation up to and including the answer. ``place`` is the digest of
    the session and of the conversation before the answer. ``parent``: the key of the record that this record continues.
    """

    @property
    def is_on(self) -> bool:
        """True if there is a store that outlives the router."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def add(
        self, session: str | None, name: bytes, place: bytes, parent: bytes, content: Callable[[], bytes]
    ) -> bytes:
        """Add a record and return its key.

        The record is saved at the latest when an answer of its session is demoted, or when the router ends.
        ``content()`` is called when the record is saved or read. It returns the record's bytes, the same at each call.
        ``parent`` is empty if the record continues no other record.
        """

    def save_soon(self, key: bytes) -> None:
        """Save the record of ``key`` soon. Call this when the chat turn in the record leaves the caller's memory."""

    async def look(self) -> None:
        """Read the notes that other routers have written to the store. Raises HTTPError."""

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the keys of the records that ``names`` lead to, oldest first. ``names`` may contain places, too.

        Leaves out a record if another record at the same place may be lost: the client may mean the lost record.
        """

    def has_answers(self, place: bytes) -> bool:
        """Return True if there is a record at ``place``, even one that :meth:`find` leaves out. O(1)."""

    def has_later_elsewhere(self, key: bytes) -> bool:
        """Return True if another router may have a later answer to the chat request that the record ``key`` answers."""

    def is_coming(self, key: bytes, /) -> bool:
        """Return True if another router may still have to copy the record of ``key`` to the store."""

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the contents of the records of ``keys``, None for a record that is lost or deleted.

        Raises HTTPError, also if one of the records is not copied to the store yet.
        """

    def is_own(self, key: bytes) -> bool:
        """Return True if this run of the router recorded ``key``."""

    async def ask_again(self, place: bytes) -> None:
        """Note that ``place`` may get several records. Call this before the request for the second record is sent.

        Raises HTTPError if the store may have a record at ``place`` and the note cannot be written now. Then do not
        send the request.
        """

    def has_lost(self, session: str | None) -> bool:
        """Return True if something of ``session`` is lost, or for None, something of requests without a session."""
