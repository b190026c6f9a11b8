"""Limits of the cache."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cache: tokens, bytes, and weight versions since the last use. A limit of 0 is no limit."""

    tokens: int = 0
    size_bytes: int = 0
    versions: int = 5

    def exceeded(self, unused_versions: int, tokens: int, size_bytes: int) -> str | None:
        """Return the name of an exceeded limit, or None. The limit ``versions`` counts as exceeded when it is reached.

        ``unused_versions``: the number of versions since the last use.
        """
        if 0 < self.versions <= unused_versions:
            return "weight_version"
        if 0 < self.tokens < tokens:
            return "max_tokens"
        return "max_bytes" if 0 < self.size_bytes < size_bytes else None
