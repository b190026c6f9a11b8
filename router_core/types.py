"""Types that all modules share: aliases for ASGI's types, and the interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slime_http.asgi import ASGIApp, Headers, Message, Receive, Scope, Send

__all__ = ["ASGIApp", "Headers", "Message", "Receive", "Scope", "Send", "Tokenizer"]


class Tokenizer(Protocol):
    """The methods of a tokenizer that plugins need. The tokenizer is the component ``"tokenizer"``.

    The tokenizers of Transformers and of the embedded engine have these methods.
    """

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """Token ids of ``text``; special tokens written in the text become one id each."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        ...
