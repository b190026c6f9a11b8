"""The Rust tokenizer inside one of transformers, as a copy of our own: transformers changes the shared one in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tokenizers

from router_core.types import Tokenizer

__all__ = ["Decoder", "decoder_of", "own_copy"]

#: The text of ids, with or without (true) special tokens.
_Decode: TypeAlias = Callable[[Sequence[int], bool], str]

#: Of more, only a batch is decoded without holding up other threads.
_MANY_IDS = 1 << 13
_TRANSFORMERS = "transformers.tokenization_"


class Decoder(NamedTuple):
    """``decode`` ids; the ``special`` ones are known to be dropped before it begins, if it is to leave them out."""

    decode: _Decode
    special: frozenset[int] = frozenset()


def own_copy(tokenizer: Tokenizer) -> tokenizers.Tokenizer | None:
    """None when there is none inside ``tokenizer``."""
    rust: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(rust, tokenizers.Tokenizer):
        return None
    own = tokenizers.Tokenizer.from_str(rust.to_str())
    own.no_truncation()
    own.no_padding()
    return own


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """Return a decoder for ``tokenizer``; at half its cost when all that it does is to ask the Rust one."""
    own = own_copy(tokenizer)
    if own is None or not _only_asks(tokenizer):
        return Decoder(lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip))
    rust = own

    def decode(ids: Sequence[int], skip: bool) -> str:
        if len(ids) < _MANY_IDS:
            return str(rust.decode(ids, skip_special_tokens=skip))
        return str(rust.decode_batch([ids], skip_special_tokens=skip)[0])

    added = rust.get_added_tokens_decoder().items()
    return Decoder(decode, frozenset(number for number, token in added if token.special))


def _only_asks(tokenizer: Tokenizer) -> bool:
    """False if it cleans up spaces, or its class has a way of its own."""
    if getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return False
    owners = [
        next((each.__module__ for each in type(tokenizer).__mro__ if name in vars(each)), "")
        for name in ("decode", "_decode")
    ]
    return all(owner.startswith(_TRANSFORMERS) for owner in owners)
