"""The header in front of a stored block: its key, its length, a checksum of its bytes, and one of the header.

======  ======  ==========================================================
offset  bytes   content
======  ======  ==========================================================
0       8       ``SLIMEBLK``
8       4       version of the format, 1
12      4       length of the bytes behind the header
16      16      key
32      8       XXH3-64 of the bytes behind the header
40      16      zeros
56      8       XXH3-64 of the 56 bytes before
======  ======  ==========================================================

All numbers are little-endian.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

__all__ = ["HEADER_BYTES", "Buffer", "block_header", "header_of", "mismatch"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"SLIMEBLK"
_VERSION = 1
_FIELDS = Struct("<8sII16sQ16x")
_SUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size


def block_header(key: bytes, content: Buffer) -> bytes:
    """Return the header of a block. ``key``: 16 bytes."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(content), key, xxh3_64_intdigest(content))
    return fields + _SUM.pack(xxh3_64_intdigest(fields))


def header_of(data: Buffer) -> tuple[bytes, int, int]:
    """Return key, length and checksum of the content from a header. Raises ValueError, which says what is wrong."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"the header has {len(data)} bytes instead of {HEADER_BYTES}")
    magic, version, length, key, checksum = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("it has no header")
    if _SUM.unpack_from(data, _FIELDS.size)[0] != xxh3_64_intdigest(data[: _FIELDS.size]):
        raise ValueError("its header has a wrong checksum")
    if version != _VERSION:
        raise ValueError(f"its format has version {version}, not {_VERSION}")
    return key, length, checksum


def mismatch(block: memoryview, key: bytes, at_least: int) -> str | None:
    """Compare the content of a block with the header before it. Return None when it is intact, else what is wrong.

    Bytes past the length in the header are not looked at. ``at_least``: the number of bytes that its reader wants.
    """
    try:
        found, length, checksum = header_of(block[:HEADER_BYTES])
    except ValueError as error:
        return str(error)
    if found != key:
        return f"its header has the key {found.hex()}"
    if length < at_least:
        return f"it has {length} bytes instead of {at_least}"
    content = block[HEADER_BYTES : HEADER_BYTES + length]
    if len(content) < length:
        return f"it has {len(content)} bytes instead of {length}"
    return None if xxh3_64_intdigest(content) == checksum else "its content has a wrong checksum"
