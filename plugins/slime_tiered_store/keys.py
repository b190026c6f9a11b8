"""Block keys: chained digests of tokens, seeded by a namespace."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from slime_tiered_store.tier import BlockKey

__all__ = ["KEY_BYTES", "TOKEN_BYTES", "Namespace", "SequenceMeta", "block_key", "key_at"]

KEY_BYTES = 16
TOKEN_BYTES = 4

_FORMAT = b"slime tiered store 1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that stored rows depend on, except the tokens. A row is the bytes that are stored for one token.

    Blocks of two namespaces never have equal keys.
    ``variant`` separates different rows of equal tokens, such as two samples whose logprobs differ in the last bit.
    A weight update needs no flush, because each ``weight_version`` has its own namespace.
    """

    model: str
    adapter: str = ""
    weight_version: str = ""
    dtype: str = ""
    layout: str = ""
    variant: str = ""

    def root_key(self, tokens_per_block: int, bytes_per_token: int) -> BlockKey:
        """Return the key that the first block is chained to.

        Each field is preceded by its length in bytes, so two namespaces never hash the same bytes.
        """
        fields = [_FORMAT, *(field.encode() for field in astuple(self))]
        framed = b"".join(struct.pack("<Q", len(field)) + field for field in fields)
        return xxh3_128_digest(framed + struct.pack("<QQ", tokens_per_block, bytes_per_token))


def block_key(parent: BlockKey, tokens: bytes) -> BlockKey:
    """Return the key of a block of ``tokens`` (int32, little endian).

    ``parent``: the key of the block before this block, or the root key for the first block.
    """
    return xxh3_128_digest(parent + tokens)


class SequenceMeta:
    """A sequence of tokens, cut into blocks, and the key of each block.

    ``token_ids``: int array of shape ``[num_tokens]``, each 0 <= id < 2**31. The last block may be shorter than
    ``tokens_per_block``. The key of a shorter block is made from fewer tokens, so a longer sequence does not find the
    block.

    ``block_hashes``: the keys, 16 bytes a block. ``token_bytes``: 4 bytes a token, int32, little endian.
    Raises ``ValueError`` for ``token_ids`` of another shape, type or range, and for a wrong ``tokens_per_block``.
    """

    __slots__ = ("block_hashes", "num_blocks", "num_tokens", "root_key", "token_bytes", "tokens_per_block")

    def __init__(self, root_key: BlockKey, token_ids: npt.ArrayLike, tokens_per_block: int) -> None:
        if tokens_per_block < 1 or tokens_per_block & (tokens_per_block - 1):
            raise ValueError(f"tokens_per_block must be a power of two, got {tokens_per_block}")
        self.root_key = root_key
        self.tokens_per_block = tokens_per_block
        self.token_bytes = _token_bytes(token_ids)
        self.num_tokens = len(self.token_bytes) // TOKEN_BYTES
        self.num_blocks = -(-self.num_tokens // tokens_per_block)
        self.block_hashes = self._chained_keys()

    def _chained_keys(self) -> bytes:
        step = self.tokens_per_block * TOKEN_BYTES
        keys, key = [], self.root_key
        for start in range(0, len(self.token_bytes), step):
            key = block_key(key, self.token_bytes[start : start + step])
            keys.append(key)
        return b"".join(keys)

    def key(self, block: int) -> BlockKey:
        """Return the key of a block. Block -1 has the root key of the namespace."""
        return key_at(self.block_hashes, block) if block >= 0 else self.root_key

    def keys(self, start: int, stop: int) -> list[BlockKey]:
        """Return the keys of the blocks from ``start`` to ``stop``."""
        packed = self.block_hashes[start * KEY_BYTES : stop * KEY_BYTES]
        return [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", packed)]

    def parent_keys(self, start: int, stop: int) -> bytes:
        """Return, for each block from ``start`` to ``stop``, the key of the block before it: 16 bytes a block."""
        keys = self.block_hashes[max(start - 1, 0) * KEY_BYTES : max(stop - 1, 0) * KEY_BYTES]
        return keys if start else self.root_key + keys

    def tokens(self, start: int, stop: int) -> bytes:
        """Return the tokens of the blocks from ``start`` to ``stop``: int32, little endian."""
        step = self.tokens_per_block * TOKEN_BYTES
        return self.token_bytes[start * step : stop * step]

    def length(self, num_blocks: int) -> int:
        """Return the number of tokens in the first ``num_blocks`` blocks."""
        return min(num_blocks * self.tokens_per_block, self.num_tokens)


def _token_bytes(token_ids: npt.ArrayLike) -> bytes:
    found = np.asarray(token_ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"token_ids must be one row of integers, got {found.dtype} of shape {found.shape}")
    if found.size and (int(found.min()) < 0 or int(found.max()) >= 2**31):
        raise ValueError(f"token ids must be 0 <= id < 2**31, got {found.min()} to {found.max()}")
    return found.astype("<i4").tobytes()


def key_at(keys: bytes, place: int) -> BlockKey:
    """Return the key number ``place``, counted from 0, of the joined ``keys``."""
    return keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]
