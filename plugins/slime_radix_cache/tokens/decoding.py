"""Decoding of ids: by the tokenizer, or by its Rust part or by bytes, where these are known to give the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from router_core.types import Tokenizer
from slime_radix_cache.tokens.backend import own_copy
from slime_radix_cache.tokens.byte_tokens import byte_decoder

__all__ = ["Decoder", "decoder_of"]

#: Returns the text of ids. Arguments: the ids; True to skip special tokens.
_Decode: TypeAlias = Callable[[Sequence[int], bool], str]

#: From this many ids on, a batch call is used, which does not block other threads.
_MANY_IDS = 1 << 13
_TRANSFORMERS = "transformers.tokenization_"


class Decoder(NamedTuple):
    """A function to ``decode`` ids, and the ``special`` ids that it skips on request (empty if they are not known)."""

    decode: _Decode
    special: frozenset[int] = frozenset()


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    """Return a decoder for ``tokenizer``.

    If the Rust tokenizer inside ``tokenizer`` gives the same texts, the decoder does without transformers: it decodes
    few ids by their bytes where that is possible, and else calls the Rust tokenizer. That takes half the time or less.
    """
    own = own_copy(tokenizer)
    if own is None or not _only_delegates(tokenizer):
        return Decoder(lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip))
    rust = own
    by_bytes = byte_decoder(own)

    def decode(ids: Sequence[int], skip: bool) -> str:
        if len(ids) < _MANY_IDS:
            if by_bytes is not None:
                return by_bytes(ids, skip)
            return str(rust.decode(ids, skip_special_tokens=skip))
        return str(rust.decode_batch([ids], skip_special_tokens=skip)[0])

    added = rust.get_added_tokens_decoder().items()
    return Decoder(decode, frozenset(number for number, token in added if token.special))


def _only_delegates(tokenizer: Tokenizer) -> bool:
    """Return False if ``tokenizer`` cleans up spaces, or its class has its own ``decode``."""
    if getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return False
    owners = [
        next((each.__module__ for each in type(tokenizer).__mro__ if name in vars(each)), "")
        for name in ("decode", "_decode")
    ]
    return all(owner.startswith(_TRANSFORMERS) for owner in owners)
