"""The component that this plugin offers to others."""

from __future__ import annotations

from typing import Protocol

__all__ = ["TextEncoder"]


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
