"""The remote tier: blocks by key in a store that several routers share."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import anyio

from router_core.errors import StartupError
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, StoreError, TierFailed, TierFull
from slime_tiered_store.tier import Block, BlockKey
from slime_tiered_store.tiers.backpressure import WriteLimit
from slime_tiered_store.tiers.block_header import HEADER_BYTES, block_header, mismatch
from slime_tiered_store.tiers.counts import TierCounts
from slime_tiered_store.tiers.remote.client import RemoteClient, RemoteError

__all__ = ["TIMEOUT_S", "RemoteTier"]

logger = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

_CAPACITY = 1 << 24
_PENDING_BYTES = 256 << 20
_WAIT_S = 30.0
TIMEOUT_S = 10.0
_ATTEMPTS = 4
#: The most bytes of one call that writes several blocks.
_PUT_BYTES = 1 << 20
_DELETED_AT_ONCE = 1000
_TRY_AGAIN_S = 60.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_FORMAT_NAME = "slime-store-remote-1"


class RemoteTier:
    """Keeps blocks of ``block_bytes`` bytes under their keys. ``counts``: the counters of the tier.

    ``capacity``: the number of blocks that this router may have in the store. A call to the store has up to
    ``attempts`` attempts of ``timeout_s`` seconds each. Call :meth:`open` first. Forgotten blocks are deleted for all
    routers, by :meth:`tidy` in the background or by ``aclose``.
    """

    def __init__(
        self, client: RemoteClient, block_bytes: int, capacity: int = _CAPACITY, *, name: str = "remote",
        pending_bytes: int = _PENDING_BYTES, wait_s: float = _WAIT_S, timeout_s: float = TIMEOUT_S,
        attempts: int = _ATTEMPTS,
    ) -> None:  # fmt: skip
        self.name = name
        self.block_bytes = block_bytes
        self.capacity = capacity
        self.counts = TierCounts()
        self.client = client
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._limit = WriteLimit(name, client.url, pending_bytes, wait_s, self.counts)
        self._calls = anyio.CapacityLimiter(client.calls_at_once)
        self._forgotten: dict[BlockKey, None] = {}
        self._deleting: frozenset[BlockKey] = frozenset()
        self._deleted = anyio.Event()
        self._news = anyio.Event()
        self._unwritten: set[BlockKey] = set()

    async def open(self) -> None:
        """Check that the store has blocks of ``block_bytes`` bytes, or write this size to a new store.

        Raises StartupError.
        """
        wanted = str(self.block_bytes).encode()
        try:
            found = await self.call(partial(self.client.get, _FORMAT_NAME))
            if found is None:
                await self.call(partial(self.client.put, {_FORMAT_NAME: wanted}))
        except RemoteError as error:
            raise StartupError(f"--store-remote {self.client.url}: {error}") from None
        if found is not None and bytes(found) != wanted:
            raise StartupError(
                f"--store-remote {self.client.url}: it has blocks of {bytes(found).decode('ascii', 'replace')} "
                f"bytes, not of {self.block_bytes}; give another prefix, directory or database"
            )

    def recovered(self) -> Mapping[BlockKey, int]:
        """Return nothing: the blocks of a shared store are found by ``holds``."""
        return {}

    async def write(self, blocks: Sequence[Block], sources: Sequence[memoryview]) -> None:
        """Store all blocks, or raise. The store has acknowledged them when the call returns.

        Raises TierBusy, TierFull and TierFailed.
        """
        for source in sources:
            if len(source) > self.block_bytes:
                raise ValueError(f"a block has at most {self.block_bytes} bytes, got {len(source)}")
        keys = {block.key for block in blocks}
        self._unwritten |= keys
        while not keys.isdisjoint(self._deleting):
            await self._deleted.wait()
        forgotten = keys.intersection(self._forgotten)
        for key in forgotten:
            del self._forgotten[key]
        try:
            async with self._limit.hold(sum(map(len, sources))):
                pairs = list(zip(blocks, sources, strict=True))
                some = max(1, min(self.client.objects_per_put, _PUT_BYTES // self.block_bytes))
                calls = [pairs[first : first + some] for first in range(0, len(pairs), some)]
                await self._each("write", self._put, calls, len(pairs))
        except BaseException:
            self._forgotten.update(dict.fromkeys(forgotten))  # the objects of these keys still exist
            self._news.set()
            raise
        self._unwritten -= keys
        self.counts.wrote(sources)

    async def read(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        """Fill ``into[i]`` with the first ``len(into[i])`` bytes of ``blocks[i]``, and verify whole blocks.

        Raises BlockMissing, BlockCorrupt and TierFailed.
        """
        await self._each("read", self._get, list(zip(blocks, into, strict=True)), len(blocks))
        self.counts.read(into)

    async def holds(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading ``keys`` that are stored. Raises TierFailed when the answer is unknown."""
        # One call first: if a sequence is not complete, it usually lacks its first block, too.
        count, step = 0, 1
        while count < len(keys):
            found = await self._each("holds", self._exists, keys[count : count + step], step)
            if not all(found):
                return count + found.index(False)
            count, step = count + step, self.client.calls_at_once
        return len(keys)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Drop blocks: at once for this process, and soon in the store.

        A block that this process failed to write is not deleted: another router may have written it.
        """
        for _, key in blocks:
            if key in self._unwritten:
                self._unwritten.remove(key)
            else:
                self._forgotten[key] = None
                self._news.set()

    async def tidy(self) -> None:
        """Delete what is forgotten, until cancelled."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            if not await self._delete_forgotten():
                await anyio.sleep(_TRY_AGAIN_S)
                self._news.set()

    async def aclose(self) -> None:
        """Delete what is forgotten, and close the connections."""
        await self._delete_forgotten()
        await self.client.aclose()

    async def _delete_forgotten(self) -> bool:
        """Delete forgotten blocks. When the store fails to delete, log the error and return False."""
        while batch := list(islice(self._forgotten, _DELETED_AT_ONCE)):
            self._deleting, self._deleted = frozenset(batch), anyio.Event()
            names = [_name(key) for key in batch]
            try:
                await self.call(partial(self.client.delete, names))
            except RemoteError as error:
                self.counts.failed(error, "delete")
                logger.error("tier %s: blocks at %s are not deleted: %s", self.name, self.client.url, error)
                return False
            finally:
                self._deleting = frozenset()
                self._deleted.set()
            for key in batch:
                self._forgotten.pop(key, None)
        return True

    async def _put(self, pairs: Sequence[tuple[Block, memoryview]]) -> None:
        # The client gets copies, since it may still use the bytes for a moment after a cancellation.
        objects = {_name(key): b"".join((block_header(key, source), source)) for (_, key), source in pairs}
        await self.call(partial(self.client.put, objects))

    async def _get(self, pair: tuple[Block, memoryview]) -> None:
        (_, key), into = pair
        data = None if key in self._forgotten else await self.call(partial(self.client.get, _name(key)))
        if data is None:
            await self._confirm()
            self.counts.missing += 1
            raise BlockMissing(self.name, key)
        block = memoryview(data)
        reason = mismatch(block, key, at_least=len(into))
        if reason is not None:
            self.counts.corrupt += 1
            raise BlockCorrupt(self.name, key, reason)
        into[:] = block[HEADER_BYTES : HEADER_BYTES + len(into)]

    async def _exists(self, key: BlockKey) -> bool:
        if key not in self._forgotten and await self.call(partial(self.client.exists, _name(key))):
            return True
        await self._confirm()
        return False

    async def _confirm(self) -> None:
        """Raise RemoteError if the store is not there at all. Then it is not known which of its blocks are missing."""
        if not await self.call(partial(self.client.is_there, _FORMAT_NAME)):
            raise RemoteError(f"it has no object {_FORMAT_NAME}: the store was emptied, or is not mounted")

    async def _each(
        self, operation: str, call: Callable[[A], Awaitable[T]], items: Sequence[A], num_blocks: int
    ) -> list[T]:
        """Make a call for each item, many at once. Raises the error of the first item that has one."""
        results: dict[int, T] = {}
        errors: dict[int, StoreError | RemoteError] = {}
        rest = iter(enumerate(items))

        async def work() -> None:
            for place, item in rest:
                try:
                    results[place] = await call(item)
                except (StoreError, RemoteError) as error:
                    errors[place] = error
                if errors:
                    return  # items are taken in order, so calls for all items before this one have begun

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self.client.calls_at_once, len(items))):
                tasks.start_soon(work)
        if errors:
            raise self._failure(operation, errors[min(errors)], num_blocks)
        return [results[place] for place in range(len(items))]

    def _failure(self, operation: str, error: StoreError | RemoteError, required: int) -> StoreError:
        if isinstance(error, StoreError):
            return error
        level = self.counts.failed(error, operation)
        logger.log(level, "tier %s: %s at %s: %s", self.name, operation, self.client.url, error)
        if error.is_full:
            return TierFull(self.name, required, 0)
        return TierFailed(self.name, operation, self.client.url, error)

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and repeat it if that may help. Each attempt has ``timeout_s`` seconds. Raises RemoteError."""

        # Not tenacity: it leaves reference cycles, which the server's garbage collector hardly ever frees.
        for number in range(self._attempts - 1):
            try:
                return await self._attempt(call)
            except RemoteError as error:
                if not error.retry:
                    raise
            # A random pause, so that several routers do not repeat their calls at the same moment.
            await anyio.sleep(random.uniform(0, min(_FIRST_WAIT_S * 2**number, _LONGEST_WAIT_S)))
        return await self._attempt(call)

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        async with self._calls:
            try:
                with anyio.fail_after(self._timeout_s):
                    return await call()
            except TimeoutError:
                raise RemoteError(f"no answer within {self._timeout_s:g} s") from None


def _name(key: BlockKey) -> str:
    """Return ``XX/KEY``, in hex: the first two digits of the key make a folder, so that no directory gets too large."""
    digits = key.hex()
    return f"{digits[:2]}/{digits}"
