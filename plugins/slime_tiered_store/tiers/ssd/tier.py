"""The SSD tier: blocks striped over directories, with all I/O in threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from errno import EDQUOT, ENOSPC
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from router_core.errors import StartupError
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, TierFailed, TierFull
from slime_tiered_store.recovered_blocks import RecoveredBlocks
from slime_tiered_store.tier import Block, BlockKey, check_ids
from slime_tiered_store.tiers.backpressure import WriteLimit
from slime_tiered_store.tiers.calls import settled
from slime_tiered_store.tiers.counts import TierCounts
from slime_tiered_store.tiers.ssd.committer import Committer
from slime_tiered_store.tiers.ssd.directory import Layout, SsdDirectory, read_layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.readers import Readers
from slime_tiered_store.tiers.ssd.runs import SlotRun, adjacent

__all__ = ["SsdTier"]

logger = logging.getLogger(__name__)

_PENDING_BYTES = 256 << 20  # for each directory
_WAIT_S = 30.0
_FULL = (ENOSPC, EDQUOT)
_NOTHING = memoryview(b"")
_ID, _KEY = itemgetter(0), itemgetter(1)


class SsdTier:
    """Blocks of ``block_bytes`` bytes, striped over directories.

    With ``n`` directories, the block ``id`` lies in slot ``id // n`` of directory ``id % n``.

    All directories have equal numbers of slots: as many as fit into ``size_bytes`` over all directories. If one has
    more slots from an earlier start, all get as many as that one. ``wait_s``: longest time that a write waits for other
    writes, and a read for the device, in seconds. ``counts``: the counters of the tier. Use :meth:`open`.
    """

    def __init__(
        self,
        directories: Sequence[SsdDirectory],
        name: str = "ssd",
        pending_bytes: int = _PENDING_BYTES,
        wait_s: float = _WAIT_S,
    ) -> None:
        self.name = name
        self.counts = TierCounts()
        layout = directories[0].layout
        self.block_bytes = layout.block_bytes
        self.capacity = layout.slots * len(directories)
        self._directories = directories
        self._committers: list[Committer] = []
        self._readers: list[Readers] = []
        where = ",".join(str(each.path) for each in directories)
        self._limit = WriteLimit(name, where, pending_bytes * len(directories), wait_s, self.counts)
        try:
            for each in directories:
                self._committers.append(Committer(each, f"{name}-write"))
                self._readers.append(Readers(each, f"{name}-read", wait_s))
        except (OSError, RuntimeError, MemoryError) as error:
            self._close()
            told = str(error) or "out of memory"
            raise StartupError(
                f"--store-ssd {where}: its threads and buffers cannot be made: {told}; raise the limit of threads "
                "(ulimit -u, or pids.max of the container) or of memory"
            ) from None

    @classmethod
    async def open(
        cls,
        paths: Sequence[Path],
        size_bytes: int,
        block_bytes: int,
        ops: FileOps | None = None,
        check_capacity: Callable[[int], object] | None = None,
        **options: Any,
    ) -> SsdTier:
        """Open or create the directories. ``options`` are those of the constructor. Raises StartupError.

        ``check_capacity`` gets the number of blocks before any file is made. It may raise.
        """
        open_all = partial(_opened, paths, size_bytes, block_bytes, ops or FileOps(), check_capacity)
        return cls(await anyio.to_thread.run_sync(open_all), **options)

    def recovered(self) -> Mapping[BlockKey, int]:
        """Return the ids of the blocks that an earlier process left, by key."""
        count = len(self._directories)
        held = [directory.log.table.held_keys() for directory in self._directories]
        ids = np.concatenate([slots * count + number for number, (slots, _) in enumerate(held)])
        return RecoveredBlocks(b"".join(keys for _, keys in held), ids)

    async def write(self, blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
        """Store all blocks, or raise. They are on the devices when the call returns.

        Raises TierBusy, TierFull and TierFailed.
        """
        parts = self._runs(blocks, sources)
        async with self._limit.hold(sum(map(len, sources))):
            calls: dict[int, Future[None]] = {}
            try:
                for number, part in parts.items():
                    calls[number] = self._committers[number].write(part)
            finally:  # if a call cannot start, earlier calls already use the sources
                await settled(list(calls.values()))
        for number, call in calls.items():
            if (error := call.exception()) is not None:
                raise self._failure("write", number, error, len(blocks))
        self.counts.wrote(sources)

    async def read(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        """Fill ``into[i]`` with the first ``len(into[i])`` bytes of ``blocks[i]``, and verify whole blocks.

        Raises BlockMissing, BlockCorrupt and TierFailed.
        """
        parts = self._runs(blocks, into)
        tables = {number: self._directories[number].log.table for number in parts}
        missing = {
            key for number, runs in parts.items() for run in runs for key in tables[number].missing(run)
        }
        for _, key in blocks if missing else ():
            if key in missing:
                self.counts.missing += 1
                raise BlockMissing(self.name, key)
        corrupt: dict[bytes, str] = {}
        errors: dict[int, Exception] = {}

        async def read(number: int) -> None:
            try:
                corrupt.update(await self._readers[number].read(parts[number]))
            except Exception as error:
                errors[number] = error

        if len(parts) == 1:
            await read(*parts)
        else:
            async with anyio.create_task_group() as tasks:
                for number in parts:
                    tasks.start_soon(read, number)
        for number, error in errors.items():
            raise self._failure("read", number, error, len(blocks))
        for _, key in blocks if corrupt else ():
            if key in corrupt:
                self.counts.corrupt += 1
                raise BlockCorrupt(self.name, key, corrupt[key])
        self.counts.read(into)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Drop the contents of blocks: at once for this process, and soon on the devices."""
        for number, runs in self._runs(blocks, [_NOTHING] * len(blocks)).items():
            self._committers[number].free(runs)

    async def aclose(self) -> None:
        """Record what was forgotten, and close the files."""
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        for readers in self._readers:
            readers.close()
        for committer in self._committers:
            committer.close()
        for directory in self._directories:
            directory.close()

    def _runs(self, blocks: Sequence[Block], buffers: Sequence[memoryview]) -> dict[int, list[SlotRun]]:
        """Return the runs of the blocks in each directory, by directory number. Raises IndexError and ValueError."""
        longest = max(map(len, buffers), default=0)
        if longest > self.block_bytes:
            raise ValueError(f"a block has at most {self.block_bytes} bytes, got {longest}")
        if len(buffers) != len(blocks):
            raise ValueError(f"wanted a buffer for each of {len(blocks)} blocks, got {len(buffers)}")
        ids, keys = list(map(_ID, blocks)), list(map(_KEY, blocks))
        check_ids(self.name, self.capacity, ids)
        count, slot_bytes = len(self._directories), self._directories[0].layout.slot_bytes
        if count == 1:  # no need to sort by directory, which would take half of the time
            return {0: list(adjacent(ids, keys, buffers, slot_bytes))} if ids else {}
        parts: dict[int, list[SlotRun]] = {}
        for number in range(count):
            is_here = [block_id % count == number for block_id in ids]
            slots = [block_id // count for block_id in compress(ids, is_here)]
            if slots:
                own_keys, own_buffers = list(compress(keys, is_here)), list(compress(buffers, is_here))
                parts[number] = list(adjacent(slots, own_keys, own_buffers, slot_bytes))
        return parts

    def _failure(self, operation: str, number: int, error: BaseException, required: int) -> BaseException:
        """Count an error of a call, and return it as an error of the tier. Any error but an OSError stays as it is."""
        path = self._directories[number].path
        level = self.counts.failed(error, operation)
        if not isinstance(error, OSError):
            return error
        logger.log(level, "tier %s: %s in %s: %s", self.name, operation, path, error)
        if error.errno in _FULL:
            return TierFull(self.name, required, 0)
        return TierFailed(self.name, operation, str(path), error)


def _opened(
    paths: Sequence[Path],
    size_bytes: int,
    block_bytes: int,
    ops: FileOps,
    check_capacity: Callable[[int], object] | None,
) -> list[SsdDirectory]:
    """Open all directories, with equal numbers of slots, or none of them. Raises StartupError."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise StartupError("--store-ssd: wanted different directories, got one twice")
    layout = Layout.within(size_bytes // len(paths), block_bytes)
    for path in paths:
        try:
            former = read_layout(path)
        except (OSError, ValueError):
            continue  # opening the directory raises, and says what is wrong
        if former is not None and former.slots > layout.slots:
            layout = Layout(block_bytes, former.slots)
            logger.warning("%s: it keeps its %d blocks: files are never made smaller", path, former.slots)
    if check_capacity is not None:
        check_capacity(layout.slots * len(paths))
    directories: list[SsdDirectory] = []
    try:
        for path in paths:
            directories.append(SsdDirectory(path, layout, ops))
    except BaseException:
        for directory in directories:
            directory.close()
        raise
    return directories
