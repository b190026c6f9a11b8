"""The part of the component ``"cold_store"`` that this plugin uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["RecordStore"]


class RecordStore(Protocol):
    """A store of records, see slime_radix_cache.cold_store.ColdStore."""

    wait_s: float

    @property
    def is_shared(self) -> bool: ...

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None: ...
    async def holds(self, key: bytes) -> bool: ...
    async def read(self, key: bytes, into: memoryview) -> bool: ...
    def forget(self, keys: Sequence[bytes]) -> None: ...
    def learn(self, sizes: Mapping[bytes, int]) -> None: ...
    def unlearn(self, keys: Sequence[bytes]) -> None: ...
