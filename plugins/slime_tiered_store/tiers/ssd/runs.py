"""Runs of blocks in adjacent slots: what one system call reads or writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["SlotRun", "adjacent"]

_RUN_BYTES = 1 << 20  # a buffer that stays in the processor's cache


class SlotRun(NamedTuple):
    """Blocks in the slots from ``slot`` on: their keys, and the bytes to write, or buffers for their beginnings."""

    slot: int
    keys: list[bytes]
    buffers: list[memoryview]


def adjacent(blocks: Iterable[tuple[int, bytes, memoryview]], slot_bytes: int) -> Iterator[SlotRun]:
    """Cut blocks, given as slot, key and buffer, into runs of at most 1 MiB, or of one block."""
    at_once = max(1, _RUN_BYTES // slot_bytes)
    run, end = SlotRun(0, [], []), -1
    for slot, key, buffer in blocks:
        if slot != end or slot - run.slot == at_once:
            if run.keys:
                yield run
            run = SlotRun(slot, [], [])
        run.keys.append(key)
        run.buffers.append(buffer)
        end = slot + 1
    if run.keys:
        yield run
