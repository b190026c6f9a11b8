"""The form of a record in the store: a sequence of its own.

Its rows hold the record's length in bytes, its content, and zeros up to the end of the last block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from slime_tiered_store.frames import Layout
from slime_tiered_store.keys import Namespace, SequenceMeta

__all__ = ["LAYOUT", "LENGTH", "blocks_of", "content_of", "hashes_of", "namespace_of", "rows_of", "tokens_of"]

#: A block has one row. On the disk, the row, the header of ``frames`` with the token (36 bytes in all) and the header
#: of the SSD tier (64 bytes) fill 4 KiB.
LAYOUT = Layout(tokens_per_block=1, bytes_per_token=4096 - 36 - 64)
#: The format of the length of a record. The length is before the content.
LENGTH = struct.Struct("<Q")
#: The number of records after which :func:`hashes_of` lets other tasks run.
_AT_ONCE = 64


def namespace_of(key: bytes) -> Namespace:
    """Return the namespace of the record of ``key``."""
    return Namespace("trajectories", variant=key.hex())


def tokens_of(blocks: int) -> npt.NDArray[np.int32]:
    """Return the tokens of a record: zeros. They need not differ, since each record has a namespace of its own."""
    return np.zeros(blocks, np.int32)


def blocks_of(size: int) -> int:
    """Return the number of blocks of a record of ``size`` bytes."""
    return -(-(LENGTH.size + size) // LAYOUT.bytes_per_token)


def rows_of(content: bytes) -> bytes:
    """Return the rows of a record."""
    size = blocks_of(len(content)) * LAYOUT.bytes_per_token
    return (LENGTH.pack(len(content)) + content).ljust(size, b"\0")


def content_of(rows: bytes) -> bytes | None:
    """Return the record in ``rows``; None if rows are missing."""
    if len(rows) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(rows)
    return rows[LENGTH.size : LENGTH.size + length] if LENGTH.size + length <= len(rows) else None


async def hashes_of(
    sizes: Mapping[bytes, int], meta: Callable[[Namespace, npt.ArrayLike], SequenceMeta]
) -> list[bytes]:
    """Return, for each record, the joined keys of its blocks.

    ``sizes``: the bytes of each record, by key. ``meta``: the method ``sequence_meta`` of a TieredStore.
    """
    hashes: list[bytes] = []
    for number, (key, size) in enumerate(sizes.items()):
        hashes.append(meta(namespace_of(key), tokens_of(blocks_of(size))).block_hashes)
        if number % _AT_ONCE == 0:
            await anyio.lowlevel.checkpoint()
    return hashes
