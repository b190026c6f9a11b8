"""Decoding for byte-level vocabularies, in which each token stands for the same bytes in any context.

The ``tokenizers`` library turns tokens into strings, and the strings into bytes, in each call. Here the bytes of each
token are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import tokenizers

from slime_radix_cache.tokens.backend import VOCABULARIES

__all__ = ["byte_decoder"]

logger = logging.getLogger(__name__)

#: How many tokens are decoded together for a comparison.
_TOGETHER = 64


@lru_cache(maxsize=VOCABULARIES)
def byte_decoder(own: tokenizers.Tokenizer) -> Callable[[Sequence[int], bool], str] | None:
    """Return a function that decodes ids as ``own`` does, in a third of the time; or None.

    The function's second argument is True to skip special tokens. The result is None for a vocabulary that is not
    byte-level. It is also None, with a warning in the log, if the function would decode some tokens in another way than
    ``own``. The call takes about 0.5 s for 150,000 tokens, once per process.
    """
    if not isinstance(own.decoder, tokenizers.decoders.ByteLevel):
        return None
    decode = _decoder(own)
    ids = list(own.get_vocab().values())
    some = [ids[start : start + _TOGETHER] for start in range(0, len(ids), _TOGETHER)]
    for skip in (True, False):
        if own.decode_batch(some, skip_special_tokens=skip) != [decode(one, skip) for one in some]:
            logger.warning(
                "tokens are not decoded as bytes: the tokenizers library decodes some in another way"
            )
            return None
    return _decoder(own)  # a new decoder, with an empty cache


def _decoder(own: tokenizers.Tokenizer) -> Callable[[Sequence[int], bool], str]:
    special = {token.content for token in own.get_added_tokens_decoder().values() if token.special}
    plain, shown = _Bytes(own, frozenset()), _Bytes(own, frozenset(special))

    def decode(ids: Sequence[int], skip: bool) -> str:
        return b"".join(map((shown if skip else plain).__getitem__, ids)).decode("utf-8", "replace")

    return decode


class _Bytes(dict[int, bytes]):
    """The bytes of tokens by id, made when first needed; empty for unknown tokens and for tokens in ``left_out``."""

    def __init__(self, own: tokenizers.Tokenizer, left_out: frozenset[str]) -> None:
        super().__init__()
        self._own = own
        self._left_out = left_out

    def __missing__(self, number: int) -> bytes:
        token = self._own.id_to_token(number)
        if token is None or token in self._left_out:
            found = b""
        elif all(char in _BYTES for char in token):
            found = bytes(_BYTES[char] for char in token)
        else:  # an added token, which is written as it is
            found = token.encode()
        self[number] = found
        return found


def _byte_level() -> dict[str, int]:
    """Return the byte for which each character of GPT-2's tokens stands.

    A visible Latin-1 character stands for its own byte. U+0100 and the characters after it stand for the other bytes.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_level()
