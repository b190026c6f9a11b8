"""Runs of blocks in adjacent slots: what one system call reads or writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from slime_tiered_store.tier import ends_of_runs

__all__ = ["SlotRun", "adjacent", "longest_run"]

_RUN_BYTES = 1 << 20  # so that the buffer of a read stays in the processor's cache


class SlotRun(NamedTuple):
    """Blocks in the slots from ``slot`` on. ``buffers``: the bytes to write, or memory for the bytes to read."""

    slot: int
    keys: Sequence[bytes]
    buffers: Sequence[memoryview]


def adjacent(
    slots: list[int], keys: Sequence[bytes], buffers: Sequence[memoryview], slot_bytes: int
) -> Iterator[SlotRun]:
    """Cut blocks, given by slot, key and buffer, into runs of at most 1 MiB, or of one block if that is larger."""
    at_once = longest_run(slot_bytes)
    for begin, end in pairwise((0, *ends_of_runs(slots))):
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            yield SlotRun(slots[first], keys[first:last], buffers[first:last])


def longest_run(slot_bytes: int) -> int:
    """Return the largest number of blocks in a run."""
    return max(1, _RUN_BYTES // slot_bytes)
