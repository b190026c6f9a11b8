"""Memory into which runs of slots are read, and in which their blocks are verified."""

from __future__ import annotations

from errno import EIO

from slime_tiered_store.tiers.block_header import HEADER_BYTES, HeaderRows, mismatch
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.runs import SlotRun

__all__ = ["RunBuffer"]


class RunBuffer:
    """Memory for runs of at most ``slots`` slots. One thread uses it at a time.

    The views of the slots are made once: to make them for each read would cost more than the checksums.
    """

    def __init__(self, slots: int, slot_bytes: int, block_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._block_bytes = block_bytes
        self._data = memoryview(bytearray(slots * slot_bytes))
        begins = range(HEADER_BYTES, len(self._data), slot_bytes)
        self._blocks = [self._data[begin : begin + block_bytes] for begin in begins]
        self._headers = HeaderRows(self._data, slot_bytes)

    def read(self, ops: FileOps, fd: int, run: SlotRun) -> tuple[list[memoryview], dict[bytes, str]]:
        """Return the beginning of each block, and what is wrong with each damaged block, by key.

        A beginning is as long as the buffer in ``run``, and valid until the next read. Checksums are of whole blocks.
        The buffers of ``run`` stay as they are. Raises OSError.
        """
        count = len(run.keys)
        size = count * self._slot_bytes
        if ops.read(fd, [self._data[:size]], run.slot * self._slot_bytes) < size:
            raise OSError(EIO, f"the file ends within the slots {run.slot} to {run.slot + count - 1}")
        contents = self._blocks[:count]
        if sum(map(len, run.buffers)) < count * self._block_bytes:
            contents = [block[: len(into)] for block, into in zip(contents, run.buffers, strict=True)]
        damaged = dict[bytes, str]()
        for number in self._headers.differing(run.keys, contents):  # damaged, or longer than its buffer
            key, slot = run.keys[number], self._data[number * self._slot_bytes :][: self._slot_bytes]
            reason = mismatch(slot, key, at_least=len(contents[number]))
            if reason is not None:
                damaged[key] = reason
        return contents, damaged
