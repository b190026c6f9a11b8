"""Reads of blocks into private buffers, while the memory tier has no room for the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slime_tiered_store.engine.sources import Source
from slime_tiered_store.frames import CHECKSUM_BYTES, Layout
from slime_tiered_store.keys import SequenceMeta
from slime_tiered_store.tier import BlockKey

__all__ = ["StagedRead", "Staging", "usable_frames"]


class Staging:
    """The reads under way, by the keys of their blocks. A get that needs one of these blocks waits until it is read."""

    def __init__(self) -> None:
        self.reads: dict[BlockKey, StagedRead] = {}

    def begin(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> StagedRead:
        """Add a read of the blocks ``keys`` into ``buffers``. The read is removed when it ends."""
        read = StagedRead(self, dict(zip(keys, buffers, strict=True)))
        self.reads.update(dict.fromkeys(keys, read))
        return read


class StagedRead:
    """One read for all gets that need its blocks meanwhile.

    ``frames``: the bytes of each block by its key; empty until the read has completed. The bytes are freed with the
    last plan or waiting call that refers to them.
    """

    def __init__(self, staging: Staging, buffers: dict[BlockKey, memoryview]) -> None:
        self.frames: dict[BlockKey, memoryview] = {}
        self._staging = staging
        self._buffers = buffers
        self._callbacks: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the read has ended."""
        self._callbacks.append(callback)

    def end(self, error: Exception | None) -> Exception | None:
        """Give the frames to the waiting gets, unless the read has failed. Return ``error``."""
        if error is None:
            self.frames.update(self._buffers)
        self.discard()
        return error

    def discard(self) -> None:
        """End the read. The waiting gets receive no further frames."""
        reads = self._staging.reads
        for key in [key for key in self._buffers if reads.get(key) is self]:
            del reads[key]
        self._buffers = {}
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def usable_frames(
    layout: Layout, sequence_meta: SequenceMeta, sources: Sequence[Source], start: int,
    frames: Mapping[BlockKey, memoryview],
) -> list[memoryview]:  # fmt: skip
    """Return the ``frames`` of the blocks from ``start`` on, up to the first block without a usable frame.

    A frame is usable if it has the tokens of the sequence. If the tier's index has a checksum of the block, the frame
    must have this checksum, too: the block may have been forgotten since it was read, and stored again with other rows.
    """
    usable: list[memoryview] = []
    for source in sources if frames else ():
        known = source.match_result.checksums()[
            : source.match_result.num_ready_matched_blocks * CHECKSUM_BYTES
        ]
        for at in range(start + len(usable), source.stop):
            frame = frames.get(sequence_meta.key(at))
            checksum = known[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]
            if frame is None or not layout.holds(frame, sequence_meta.tokens(at, at + 1), checksum):
                return usable
            usable.append(frame)
    return usable
