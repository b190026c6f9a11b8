"""Text and bytes of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = ["Piece", "Pieces"]

#: A decoder writes this for bytes that are no (whole) character.
_BROKEN = "\ufffd"
#: Largest number of tokens whose text is cached: enough for the vocabulary of most models.
_TOKENS = 1 << 18
#: A text that is decoded before each token, since SentencePiece leaves out the space of a first token.
_BEFORE = "One"
#: The name of a token of one byte in vocabularies with byte fallback.
_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """The part of a text that one token adds. ``text``: None if the ``raw`` bytes are not UTF-8, or not known.

    ``raw`` is None if the bytes are not known. A token without text has an empty ``text``.
    """

    text: str | None
    raw: bytes | None


class Pieces:
    """The pieces of a tokenizer's tokens. Thread-safe.

    ``decode``: returns the text of ids, with special tokens spelt out. If a token's bytes are not UTF-8, they are read
    from the vocabulary of ``tokenizer.backend_tokenizer``, which must be a Rust tokenizer for this.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tokenizer: Any) -> None:
        self._decode = decode
        self._before = self._ids_before(tokenizer)
        self._lead = len(decode(self._before)) if self._before else 0
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes_of = _bytes_reader(self._backend)
        self.of = lru_cache(_TOKENS)(self._piece)

    def _ids_before(self, tokenizer: Any) -> list[int]:
        ids = list(tokenizer.encode(_BEFORE, add_special_tokens=False))
        return ids if self._decode(ids).endswith(_BEFORE) else []

    def _piece(self, token: int) -> Piece:
        text = self._decode([*self._before, token])[self._lead :]
        if _BROKEN not in text:
            return Piece(text, text.encode())
        raw = self._raw(token)
        if raw is None:
            return Piece(None, None)
        try:
            return Piece(raw.decode(), raw)
        except UnicodeDecodeError:
            return Piece(None, raw)

    def _raw(self, token: int) -> bytes | None:
        name = self._backend.id_to_token(token) if self._bytes_of is not None else None
        return self._bytes_of(name) if self._bytes_of is not None and isinstance(name, str) else None


def _bytes_reader(backend: Any) -> Callable[[str], bytes | None] | None:
    """Return a function that reads the bytes of a token from its name; None for an unknown kind of vocabulary."""
    try:
        # Not backend.to_str(): writing and reading a vocabulary of 150,000 tokens would hold the GIL for 0.2 s.
        decoder = json.dumps(json.loads(backend.decoder.__getstate__()))
    except (AttributeError, TypeError, ValueError):
        return None  # no Rust tokenizer, or one without a decoder
    if '"ByteLevel"' in decoder:
        return _byte_level
    return _byte_fallback if '"ByteFallback"' in decoder else None


def _byte_level(name: str) -> bytes | None:
    alphabet = _byte_alphabet()
    return bytes(alphabet[sign] for sign in name) if all(sign in alphabet for sign in name) else None


def _byte_fallback(name: str) -> bytes | None:
    found = _ONE_BYTE.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's ``bytes_to_unicode``)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
