"""A copy of the Rust tokenizer inside a transformers tokenizer, since transformers changes the original's state."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tokenizers

from router_core.types import Tokenizer

__all__ = ["VOCABULARIES", "own_copy"]

#: How many vocabularies are cached, with what is made from them: reading one of 150,000 tokens takes half a second.
VOCABULARIES = 2


def own_copy(tokenizer: Tokenizer) -> tokenizers.Tokenizer | None:
    """Return a copy of the Rust tokenizer inside ``tokenizer``, or None. All callers share it: do not change it."""
    rust: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(rust, tokenizers.Tokenizer):
        return None
    own: tokenizers.Tokenizer = _read(rust.to_str())
    return own


@lru_cache(maxsize=VOCABULARIES)
def _read(vocabulary: str) -> tokenizers.Tokenizer:
    own = tokenizers.Tokenizer.from_str(vocabulary)
    own.no_truncation()
    own.no_padding()
    return own
