"""Runs of blocks in adjacent slots: what one system call reads or writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["SlotRun", "adjacent", "longest_run"]

_RUN_BYTES = 1 << 20  # so that the buffer of a read stays in the processor's cache


class SlotRun(NamedTuple):
    """Blocks in the slots from ``slot`` on: their keys, and the bytes to write, or buffers for their beginnings."""

    slot: int
    keys: Sequence[bytes]
    buffers: Sequence[memoryview]


def adjacent(
    slots: Sequence[int], keys: Sequence[bytes], buffers: Sequence[memoryview], slot_bytes: int
) -> Iterator[SlotRun]:
    """Cut blocks, given by slot, key and buffer, into runs of at most 1 MiB, or of one block."""
    at_once = longest_run(slot_bytes)
    begin = 0
    for end, slot in enumerate(slots, 1):
        if end == len(slots) or slots[end] != slot + 1 or end - begin == at_once:
            yield SlotRun(slots[begin], keys[begin:end], buffers[begin:end])
            begin = end


def longest_run(slot_bytes: int) -> int:
    """Return the number of blocks in a run at most."""
    return max(1, _RUN_BYTES // slot_bytes)
