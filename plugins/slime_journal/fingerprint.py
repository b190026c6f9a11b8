"""A fingerprint that tells a tokenizer whose ids differ from others."""

from __future__ import annotations

from array import array
from zlib import crc32

from router_core.types import Tokenizer

__all__ = ["fingerprint"]

_SAMPLE = "def f(x): return 1234567 * x  # The quick brown fox, 敏捷的狐狸, быстрая лиса. <|im_end|>\n"


def fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that cut a text of many kinds alike. What is kept in ids is read by no others."""
    ids = array("i", tokenizer.encode(_SAMPLE, add_special_tokens=False))
    return f"{crc32(ids):08x}"
