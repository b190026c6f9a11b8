"""A fingerprint of a tokenizer, by which a log refuses the ids of another tokenizer."""

from __future__ import annotations

from array import array
from zlib import crc32

from router_core.types import Tokenizer

__all__ = ["fingerprint"]

_SAMPLE = "def f(x): return 1234567 * x  # The quick brown fox, 敏捷的狐狸, быстрая лиса. <|im_end|>\n"


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a checksum of the ids of a sample text. Stored ids are read only if their checksum is equal."""
    ids = array("i", tokenizer.encode(_SAMPLE, add_special_tokens=False))
    return f"{crc32(ids):08x}"
