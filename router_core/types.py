"""Names that several modules and plugins share: ASGI aliases and the Protocols of shared components."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from router_core.exchange import Exchange
    from router_core.reply import Reply
    from router_core.request import Request
    from router_core.workers import Worker

__all__ = [
    "GENERATION_PATHS",
    "ASGIApp",
    "Breaking",
    "Dispatcher",
    "Endings",
    "Headers",
    "Message",
    "Receive",
    "Recognizer",
    "Scope",
    "Send",
    "Stillness",
    "TextEncoder",
    "Tokenizer",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Header names (lower case) and values as they stood on the wire, in order, duplicates kept.
Headers = list[tuple[bytes, bytes]]


#: Where engines generate, as it stands on the wire: what waits while they are paused, is limited, and may be repeated.
GENERATION_PATHS = frozenset(
    (
        b"/generate", b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages",
        b"/invocations", b"/vertex_generate", b"/api/chat", b"/api/generate",
    )
)  # fmt: skip


class Dispatcher(Protocol):
    """Gives an exchange to a worker; ``router.dispatcher``, which is the proxy, or what a plugin has put around it."""

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> Worker:
        """Lease a worker to ``exchange``, none ``but`` these; returns it, of a data-parallel rank the server.

        Raises NoWorker.
        """
        ...

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Ask what ``exchange`` has leased, once; ``exchange.worker`` is who answered, or failed. Raises HTTPError.

        ``body``, if it is to get another one than the request's.
        """
        ...


class Breaking(Protocol):
    """Circuit breakers, for who asks more than one worker; the component ``"breakers"``. Workers are servers."""

    def begin(self, worker: Worker, attempt: Request) -> None:
        """``attempt`` is about to be sent to ``worker``."""
        ...

    def failed(self, worker: Worker, attempt: Request, how: str) -> None:
        """``worker`` has failed ``attempt``, which no connection tells."""
        ...

    def answered(self, worker: Worker, attempt: Request, reply: Reply) -> None:
        """The head of ``reply`` is there; its end is waited for."""
        ...

    def ended(self, worker: Worker, attempt: Request, *, well: bool) -> None:
        """Nothing more comes of ``attempt``. Not ``well``: given up, or what went wrong was told."""
        ...


class Tokenizer(Protocol):
    """What plugins need of a tokenizer; the component ``"tokenizer"``.

    Transformers' tokenizers and the embedded engine's both fit.
    """

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """Token ids of ``text``; special tokens written in the text become one id each."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        ...


class Endings(Protocol):
    """Knows of the aborts that are on their way to workers; the component ``"endings"``."""

    async def settled(self, worker: Worker, exchange: Exchange) -> None:
        """Return when ``worker`` has answered those of this moment, after two seconds at the latest.

        Raises Aborted when ``exchange``, which waits to be sent there, has been aborted or left meanwhile.
        """
        ...

    def rename(self, request: Request) -> bool:
        """Give ``request`` another name, unless its client has named it. True when it has one.

        Where nobody has heard of the old name yet: an engine refuses one that it has not done with.
        """
        ...


class Stillness(Protocol):
    """Knows when engines that are well may say nothing; the component ``"stillness"``."""

    def excuses(self, began: float) -> bool:
        """True when a probe that began at ``began`` (loop time) may have waited for the end of such a time."""
        ...


class Recognizer(Protocol):
    """Knows servers that are no engines of ours; the component ``"recognizer"``."""

    async def objection(self, worker: Worker) -> str | None:
        """Why ``worker``, which does not introduce itself, cannot be registered; None when it can."""
        ...


class TextEncoder(Protocol):
    """Tokenises without holding up the event loop, and no common text twice; the component ``"encoder"``."""

    async def encode(self, text: str, *, begins: bool, client: str | None = None) -> bytes:
        """Packed int32 ids of ``text``; ``begins`` when no tokens come before it. ``client``: see FairTurns.

        Raises BadRequest for a text that is too long, and what the tokenizer raises.
        """
        ...

    @property
    def max_characters(self) -> int:
        """A text of more is too long."""
        ...

    def check_text(self, text: str) -> None:
        """Raises BadRequest for a text that is too long, as far as that is seen at once."""
        ...
