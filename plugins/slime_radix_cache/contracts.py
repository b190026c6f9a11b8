"""The component that this plugin offers to others."""

from __future__ import annotations

from typing import Protocol

__all__ = ["TextEncoder"]


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
