"""Fields that many responses have in common. They are kept once, since an object for each response takes memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

__all__ = ["SharedFields", "Versions", "shared"]

#: ``(version, number of tokens)`` of consecutive runs of tokens; the version is None where the engine sent none.
Versions: TypeAlias = tuple[tuple[str | None, int], ...]


class SharedFields(NamedTuple):
    """Fields of a response; see Response.

    ``width``: bytes of one id and its logprob. ``hidden``: number of tokens in the hidden tail; -1 if the text ends
    inside a token. ``version``: the version of all tokens, or runs of versions.
    """

    width: int
    hidden: int
    version: str | Versions | None
    finish_reason: str
    doubt: str | None
    adapter: str | None
    is_sound: bool
    is_decoded: bool
    continuation_lost: bool = False


#: Returns one object for equal fields, as long as it remembers them.
shared = lru_cache(1 << 12)(SharedFields)
