"""The bytes of one block: a header, the tokens and their rows.

::

    offset 0    parent key   16 bytes
    offset 16   checksum      8 bytes, XXH3-64 of the rows, big endian
    offset 24   num_tokens    4 bytes, little endian
    offset 28   zero          4 bytes
    offset 32   tokens        4 bytes each, int32, little endian; zero in place of missing tokens
    then        rows          bytes_per_token each; undefined in place of missing rows

So a block written by another process can be verified: the parent key and the tokens give its key, and the checksum
shows whether its rows are intact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from xxhash import xxh3_64_digest

from slime_tiered_store.errors import BlockCorrupt
from slime_tiered_store.keys import TOKEN_BYTES, SequenceMeta, block_key
from slime_tiered_store.tier import BlockKey

__all__ = ["CHECKSUM_BYTES", "Layout"]

CHECKSUM_BYTES = 8
_HEADER = struct.Struct("<16s8sII")


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a block: ``tokens_per_block`` (a power of two) rows of ``bytes_per_token`` bytes."""

    tokens_per_block: int
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1 or self.tokens_per_block & (self.tokens_per_block - 1):
            raise ValueError(f"tokens_per_block must be a power of two, got {self.tokens_per_block}")
        if self.bytes_per_token < 1:
            raise ValueError(f"bytes_per_token must be positive, got {self.bytes_per_token}")

    @property
    def rows_offset(self) -> int:
        """The position of the first row in a block."""
        return _HEADER.size + self.tokens_per_block * TOKEN_BYTES

    @property
    def block_bytes(self) -> int:
        """The size of a block: the ``block_bytes`` of each tier."""
        return self.rows_offset + self.tokens_per_block * self.bytes_per_token

    def checksums(self, rows: memoryview) -> bytes:
        """Return the checksums of the rows of each block, 8 bytes a block."""
        step = self.tokens_per_block * self.bytes_per_token
        return b"".join(xxh3_64_digest(rows[start : start + step]) for start in range(0, len(rows), step))

    def write(
        self, stretches: Sequence[memoryview], sequence_meta: SequenceMeta, start: int, checksums: bytes,
        rows: memoryview,
    ) -> None:  # fmt: skip
        """Fill ``stretches`` with the blocks of ``sequence_meta`` from ``start`` on.

        A stretch is the memory of one or more adjacent blocks. Together the stretches are the memory of exactly these
        blocks. ``checksums`` (8 bytes a block) and ``rows`` are those of the whole sequence. numpy copies the rows
        without the GIL.
        """
        stop, size = sequence_meta.num_blocks, self.tokens_per_block
        dtype = _dtype_of(size, self.bytes_per_token)
        parents = np.frombuffer(sequence_meta.parent_keys(start, stop), dtype["parent"])
        known = np.frombuffer(checksums, dtype["checksum"])[start:]
        padded = sequence_meta.tokens(start, stop).ljust((stop - start) * size * TOKEN_BYTES, b"\0")
        tokens = np.frombuffer(padded, dtype["tokens"])
        step = size * self.bytes_per_token
        num_whole = len(rows) // step
        source = np.frombuffer(rows, dtype["rows"], num_whole)[start:]
        done = 0
        for stretch in stretches:
            blocks = np.frombuffer(stretch, dtype)
            part = slice(done, done + len(blocks))
            blocks["parent"], blocks["checksum"], blocks["tokens"] = parents[part], known[part], tokens[part]
            blocks["count"] = size
            blocks["rows"][: num_whole - start - done] = source[part]
            done += len(blocks)
        if num_whole < stop:  # the last block is shorter
            rest = rows[num_whole * step :]
            blocks = np.frombuffer(stretches[-1], dtype)
            blocks["count"][-1] = len(rest) // self.bytes_per_token
            stretches[-1][-step:][: len(rest)] = rest

    def frames(self, stretches: Iterable[memoryview]) -> list[memoryview]:
        """Return the memory of each block in ``stretches``."""
        size = self.block_bytes
        return [
            stretch[begin : begin + size] for stretch in stretches for begin in range(0, len(stretch), size)
        ]

    def checksums_of(self, frames: Sequence[memoryview]) -> bytes:
        """Return the checksums in the headers of ``frames``, 8 bytes a block."""
        return b"".join(bytes(frame[16 : 16 + CHECKSUM_BYTES]) for frame in frames)

    def rows(self, frame: memoryview) -> memoryview:
        """Return the rows in a block, without a copy: ``num_tokens * bytes_per_token`` bytes."""
        count = _HEADER.unpack_from(frame)[2]
        return frame[self.rows_offset : self.rows_offset + count * self.bytes_per_token]

    def holds(self, frame: memoryview, tokens: bytes, checksum: bytes) -> bool:
        """Return True if a verified block has these tokens and this checksum. An empty checksum is not compared."""
        count = _HEADER.unpack_from(frame)[2]
        return frame[_HEADER.size : _HEADER.size + count * TOKEN_BYTES] == tokens and (
            not checksum or self.checksums_of([frame]) == checksum
        )

    def verify(self, tier: str, frame: memoryview, key: BlockKey, tokens: bytes) -> bytes:
        """Verify that a block that was read is the block ``key`` of ``tokens``, and return its checksum.

        Raises ``BlockCorrupt`` for another key, for other tokens, and for rows that do not fit the checksum.
        """
        parent, checksum, count, zero = _HEADER.unpack_from(frame)
        kept = frame[_HEADER.size : _HEADER.size + count * TOKEN_BYTES]
        if zero or not 0 < count <= self.tokens_per_block or block_key(parent, bytes(kept)) != key:
            raise BlockCorrupt(tier, key, "its header belongs to another block")
        if bytes(kept) != tokens:
            raise BlockCorrupt(tier, key, "it holds other tokens with the same key")
        if xxh3_64_digest(self.rows(frame)) != checksum:
            raise BlockCorrupt(tier, key, "its rows differ from its checksum")
        return bytes(checksum)


@cache
def _dtype_of(tokens_per_block: int, bytes_per_token: int) -> np.dtype[np.void]:
    """Return the dtype of a block. All fields except ``count`` are bytes (V16: 16 bytes).

    ``count``: the number of tokens and the zero behind it, as one number of 8 bytes.
    """
    rows, tokens = tokens_per_block * bytes_per_token, tokens_per_block * TOKEN_BYTES
    return np.dtype(
        [
            ("parent", "V16"),
            ("checksum", "V8"),
            ("count", "<u8"),
            ("tokens", f"V{tokens}"),
            ("rows", f"V{rows}"),
        ]
    )
