"""Memory in which runs of slots are laid out and verified, between the device and the callers' buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EIO
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np

from slime_tiered_store.tiers.block_header import HEADER_BYTES, HeaderRows, mismatch
from slime_tiered_store.tiers.ssd.block_file import ALIGNMENT, BlockFile
from slime_tiered_store.tiers.ssd.runs import SlotRun

__all__ = ["RunBuffer", "RunBuffers", "device_memory"]

_HUGE_PAGE = 2 << 20
_ZEROS = memoryview(bytes(ALIGNMENT))


class RunBuffer:
    """Memory for runs of slots, in ``data``. One thread uses it at a time, for reads only or for writes only.

    The views of the slots are made once: to make them for each run would cost more than the checksums.
    """

    def __init__(self, data: memoryview, slot_bytes: int, block_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._block_bytes = block_bytes
        self._data = data
        begins = range(HEADER_BYTES, len(data), slot_bytes)
        self._blocks = [data[begin : begin + block_bytes] for begin in begins]
        self._headers = HeaderRows(data, slot_bytes)

    def write(self, file: BlockFile, run: SlotRun) -> None:
        """Write a run through the page cache: of each slot, only the pages that its block needs. Raises OSError."""
        first = run.slot * self._slot_bytes
        for begin, end in self._lay_out(run):
            file.write(self._data[begin:end], first + begin)

    def write_directly(self, file: BlockFile, run: SlotRun) -> bool:
        """Write blocks that need all pages of their slots, see :meth:`BlockFile.write_directly`. Raises OSError."""
        self._lay_out(run)
        return file.write_directly(
            self._data[: len(run.keys) * self._slot_bytes], run.slot * self._slot_bytes
        )

    def _lay_out(self, run: SlotRun) -> list[tuple[int, int]]:
        """Fill the memory with the blocks of a run. Return begin and end of each stretch of pages that has blocks."""
        try:
            return self._fill(run)
        except ValueError:  # the items of a source are no unsigned bytes, or it has more than one dimension
            plain = [np.frombuffer(source, np.uint8).data for source in run.buffers]
            return self._fill(run._replace(buffers=plain))

    def _fill(self, run: SlotRun) -> list[tuple[int, int]]:
        """Do what :meth:`_lay_out` does, for sources of unsigned bytes. Others raise ValueError."""
        count, begin = len(run.keys), 0
        stretches: list[tuple[int, int]] = []
        self._headers.fill(run.keys, run.buffers)
        if sum(map(len, run.buffers)) == count * self._block_bytes:
            for block, source in zip(self._blocks, run.buffers, strict=False):
                block[:] = source
        else:
            for number, source in enumerate(run.buffers):
                self._blocks[number][: len(source)] = source
                slot, end = number * self._slot_bytes, HEADER_BYTES + len(source)
                padding = -end % ALIGNMENT  # an earlier block may have left bytes there
                self._data[slot + end : slot + end + padding] = _ZEROS[:padding]
                if end + padding < self._slot_bytes:  # a gap: the next block does not follow directly
                    stretches.append((begin, slot + end + padding))
                    begin = slot + self._slot_bytes
        if begin < count * self._slot_bytes:
            stretches.append((begin, count * self._slot_bytes))
        return stretches

    def read(
        self, file: BlockFile, run: SlotRun, *, direct: bool
    ) -> tuple[list[memoryview], dict[bytes, str]]:
        """Return the beginning of each block, and what is wrong with each damaged block, by key.

        A beginning is as long as the buffer in ``run``, and valid until the next read. Whole blocks are verified.
        The buffers of ``run`` stay as they are. ``direct``: bypass the page cache. Raises OSError.
        """
        count = len(run.keys)
        size = count * self._slot_bytes
        if file.read(self._data[:size], run.slot * self._slot_bytes, direct=direct) < size:
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


class RunBuffers:
    """``count`` buffers for as many threads. All are made at once, so that no thread can lack one later.

    The constructor raises OSError and MemoryError. The pages of the buffers come at their first use.
    """

    def __init__(self, count: int, slots: int, slot_bytes: int, block_bytes: int) -> None:
        size = slots * slot_bytes
        data = device_memory(count * size)
        parts = [data[number * size :][:size] for number in range(count)]
        self._idle = [RunBuffer(part, slot_bytes, block_bytes) for part in parts]

    @contextmanager
    def take(self) -> Iterator[RunBuffer]:
        """Take a buffer that no other thread uses."""
        buffer = self._idle.pop()
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


def device_memory(size: int) -> memoryview:
    """Return memory for direct transfers. It begins at the beginning of a huge page.

    A huge page is one piece for the device. Small pages are up to 256 pieces for each MiB, which takes twice the time.
    """
    memory = mmap(-1, size + _HUGE_PAGE, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without huge pages
        memory.madvise(MADV_HUGEPAGE)
    begin = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
    return memoryview(memory)[begin : begin + size]
