"""Names that all modules share: aliases of ASGI, and what is needed of a tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

__all__ = [
    "ASGIApp",
    "Headers",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "Tokenizer",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Header names (lower case) and values as they stood on the wire, in order, duplicates kept.
Headers = list[tuple[bytes, bytes]]


class Tokenizer(Protocol):
    """The methods of a tokenizer that plugins need; the component ``"tokenizer"``.

    Transformers' tokenizers and the embedded engine's both fit.
    """

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """Token ids of ``text``; special tokens written in the text become one id each."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        ...
