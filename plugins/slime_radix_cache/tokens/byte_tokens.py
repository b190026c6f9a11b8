"""Decoding for byte-level vocabularies: each token is some bytes, whatever stands around it.

The ``tokenizers`` library makes strings of the tokens first, and bytes of those. Here the bytes of each token are kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import tokenizers

__all__ = ["byte_decoder"]

logger = logging.getLogger(__name__)

#: Tokens that are compared in one go.
_TOGETHER = 64


def byte_decoder(own: tokenizers.Tokenizer) -> Callable[[Sequence[int], bool], str] | None:
    """Return a function to decode ids as ``own`` does, in a third of its time; True skips special tokens.

    None for a vocabulary that is not byte-level. None, and that is logged, if a token is decoded in another way than by
    ``own``. About 0.5 s for 150,000 tokens; once in a process.
    """
    return _compared(own.to_str())


@lru_cache(maxsize=2)
def _compared(vocabulary: str) -> Callable[[Sequence[int], bool], str] | None:
    decoder = json.loads(vocabulary)["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    own = tokenizers.Tokenizer.from_str(vocabulary)
    decode = _decoder(own)
    ids = list(own.get_vocab().values())
    some = [ids[start : start + _TOGETHER] for start in range(0, len(ids), _TOGETHER)]
    for skip in (True, False):
        if own.decode_batch(some, skip_special_tokens=skip) != [decode(one, skip) for one in some]:
            logger.warning(
                "tokens are not decoded as bytes: the tokenizers library reads some in another way"
            )
            return None
    return _decoder(own)  # a new one, with an empty cache


def _decoder(own: tokenizers.Tokenizer) -> Callable[[Sequence[int], bool], str]:
    special = {token.content for token in own.get_added_tokens_decoder().values() if token.special}
    plain, shown = _Bytes(own, frozenset()), _Bytes(own, frozenset(special))

    def decode(ids: Sequence[int], skip: bool) -> str:
        return b"".join(map((shown if skip else plain).__getitem__, ids)).decode("utf-8", "replace")

    return decode


class _Bytes(dict[int, bytes]):
    """The bytes of each token that was asked for; none of those ``left_out``, nor of one that is unknown."""

    def __init__(self, own: tokenizers.Tokenizer, left_out: frozenset[str]) -> None:
        super().__init__()
        self._own = own
        self._left_out = left_out

    def __missing__(self, number: int) -> bytes:
        token = self._own.id_to_token(number)
        if token is None or token in self._left_out:
            found = b""
        elif all(sign in _BYTES for sign in token):
            found = bytes(_BYTES[sign] for sign in token)
        else:  # an added token, which is written as it is
            found = token.encode()
        self[number] = found
        return found


def _byte_level() -> dict[str, int]:
    """The byte of each GPT-2 sign: visible Latin-1 stands for itself, U+0100 and on for the other bytes in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_level()
