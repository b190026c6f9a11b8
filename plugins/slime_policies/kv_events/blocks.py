"""Blocks of tokens in the caches of engines, and the workers that have them.

A block is identified by a digest of all ids up to its end, so equal blocks of different engines have the same digest.
One map holds the workers of each digest as bits of one number, so a prompt is looked up once for all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slime_policies.holders import Holders
from slime_policies.kv_events.batches import Cleared, Event, Hash, Removed, Stored
from slime_policies.kv_events.prompt_ids import PromptIds

__all__ = ["Blocks", "OutOfSync", "WorkerBlocks"]


class OutOfSync(Exception):
    """The known blocks of a worker are no longer the blocks of its engine. The message says why."""


class Blocks:
    """Blocks of all workers that publish KV events, at most ``limit`` blocks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._holders = Holders()
        self._free_bits: list[int] = []
        self._bits = 0
        self._of: dict[str, WorkerBlocks] = {}

    def open(self, worker_id: str) -> WorkerBlocks:
        """Return new, empty blocks for a worker or rank, which must not be open yet."""
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._bits = 1 << self._bits, self._bits + 1
        blocks = self._of[worker_id] = WorkerBlocks(self, self._holders, bit)
        return blocks

    def close(self, worker_id: str) -> None:
        """Forget the blocks of a worker or rank, which must be open."""
        blocks = self._of.pop(worker_id)
        blocks.clear()
        self._free_bits.append(blocks.bit)

    def in_sync(self, worker_id: str) -> WorkerBlocks | None:
        """Return the blocks of a worker or rank if they are in sync with its engine, else None."""
        blocks = self._of.get(worker_id)
        return blocks if blocks is not None and blocks.is_in_sync else None

    def tokens_held(self, prompt: PromptIds, workers: Sequence[WorkerBlocks]) -> list[int]:
        """Return, for each of ``workers``, the number of tokens in the longest prefix of ``prompt`` that it has.

        O(tokens of the longest prefix), for each block size.
        """
        held: dict[int, int] = {}
        by_size: dict[int, int] = {}
        for worker in workers:
            by_size[worker.block_size] = by_size.get(worker.block_size, 0) | worker.bit
        for size, bits in by_size.items():
            if size:
                self._walk(prompt, size, bits, held)
        return [held.get(worker.bit, 0) for worker in workers]

    def _walk(self, prompt: PromptIds, size: int, having: int, held: dict[int, int]) -> None:
        """Write to ``held``, by bit, the number of first tokens of ``prompt`` that each of some workers has.

        ``having``: the bits of these workers, whose blocks have ``size`` tokens.
        """
        start, digest, ids = 0, size, prompt.ids
        holders_of = self._holders.at
        while having:
            end = start + size
            holders = 0
            if end <= len(ids) or prompt.read(end):
                digest = hash((digest, *ids[start:end]))
                holders = holders_of(digest)
            lacking = having & ~holders
            having ^= lacking
            while lacking:
                bit = lacking & -lacking
                lacking ^= bit
                held[bit] = start
            start = end


class WorkerBlocks:
    """Blocks of one worker or rank. ``is_in_sync``: the engine has all these blocks, according to its events.

    ``block_size``: tokens of a block, or 0 while there is no block.
    """

    __slots__ = ("_all", "_digests", "_holders", "bit", "block_size", "is_in_sync")

    def __init__(self, all_blocks: Blocks, holders: Holders, bit: int) -> None:
        self._all = all_blocks
        self._holders = holders
        self.bit = bit
        self.block_size = 0
        self.is_in_sync = False
        #: The digest of each block, by the engine's own name for the block.
        #: Blocks with different names may have the same digest: the name may depend on more than the ids.
        self._digests: dict[Hash, int] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def names(self) -> set[Hash]:
        """Return the engine's own names for all blocks. O(blocks)."""
        return {*self._digests}

    def apply(self, event: Event) -> None:
        """Change the blocks as ``event`` says. Raises OutOfSync if it contradicts earlier events or exceeds the limit.

        Blocks after an unknown block are left out, since not all ids before them are known.
        """
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event.hashes)
        elif isinstance(event, Cleared):
            self.clear()

    def clear(self) -> None:
        """Forget all blocks. O(blocks)."""
        for digest in self._digests.values():
            self._holders.remove(digest, self.bit)
        self._all.size -= len(self._digests)
        self._digests = {}
        self.block_size = 0

    def _store(self, event: Stored) -> None:
        size, ids = event.block_size, event.token_ids
        if not self.block_size:
            self.block_size = size
        if size != self.block_size:
            return  # such as the incomplete last page that old SGLang versions report
        if event.parent is None:
            digest = size
        elif (known := self._digests.get(event.parent)) is not None:
            digest = known
        else:
            return
        for place, name in enumerate(event.hashes):
            digest = hash((digest, *ids[place * size : (place + 1) * size]))
            before = self._digests.get(name)
            if before is None:
                if self._all.size >= self._all.limit:
                    raise OutOfSync(f"more than the {self._all.limit} blocks of --kv-events-max-blocks")
                self._digests[name] = digest
                self._all.size += 1
                self._holders.add(digest, self.bit)
            elif before != digest:
                raise OutOfSync(
                    "the engine has one name for two blocks; in some versions of SGLang, the hash of a block does"
                    " not depend on the blocks before it"
                )

    def _remove(self, hashes: Iterable[Hash]) -> None:
        for name in hashes:
            digest = self._digests.pop(name, None)
            if digest is not None:
                self._all.size -= 1
                self._holders.remove(digest, self.bit)
