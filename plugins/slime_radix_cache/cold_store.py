"""The component ``"cold_store"``, which another plugin offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["ColdStore", "StoredNote"]


class StoredNote(Protocol):
    """One or more notes of the run ``run``, joined. ``place``: describes them in messages."""

    @property
    def run(self) -> bytes: ...
    @property
    def place(self) -> str: ...
    @property
    def content(self) -> bytes: ...


class ColdStore(Protocol):
    """A store with room for records that memory has none for.

    A record is a byte string that never changes, under a key of 16 bytes. ``wait_s``: how
    long a record may wait until it is kept. ``stops_on_loss``: the router ends when a record cannot be kept.

    ``keeps_notes``: records outlive the router, and so do notes about them, in the order in which they were written.
    ``run``: the name of this run of the router, 11 bytes; those of later runs are greater. Call :meth:`notes`, then
    :meth:`adopt`, :meth:`replace_notes` and :meth:`shorten_notes`, before all other methods. The store is open before
    the lifespans of other plugins begin, and until they have ended. ``is_shared``: other routers may keep records and
    notes there, too.
    """

    wait_s: float
    stops_on_loss: bool
    run: bytes

    @property
    def keeps_notes(self) -> bool: ...

    @property
    def is_shared(self) -> bool: ...

    async def notes(self) -> Sequence[StoredNote]:
        """Return the notes of earlier runs, earliest first, and begin a new run. Raises StartupError."""
        ...

    async def adopt(self, sizes: Mapping[bytes, int]) -> Sequence[bytes]:
        """Keep the records of earlier runs with these keys and sizes in bytes, and no others of them.

        Returns the keys of those that are known to be lost.
        """
        ...

    async def news(self) -> Sequence[StoredNote]:
        """Return the notes that other routers have written since the last call, or raise. May repeat earlier ones."""
        ...

    def learn(self, sizes: Mapping[bytes, int]) -> None:
        """Let records of other routers be fetched, given with their sizes in bytes."""
        ...

    def unlearn(self, keys: Sequence[bytes]) -> None:
        """Undo :meth:`learn`: this router needs them no more, but others may."""
        ...

    async def replace_notes(self, contents: Iterable[bytes]) -> None:
        """Write ``contents`` instead of the notes of earlier runs, unless others read these. Raises StartupError."""
        ...

    async def shorten_notes(
        self, notes: Sequence[Any], shortened: Callable[[Sequence[bytes]], Sequence[bytes] | None]
    ) -> None:
        """Rewrite the notes of earlier runs where others may read them now. A failure is logged.

        ``notes``: what :meth:`notes` returned. ``shortened``: called with the contents of the notes of a run. It
        returns others to write instead, one for one, or None to leave them as they are.
        """
        ...

    async def note(self, content: bytes) -> None:
        """Append a note, or raise; then the next call must have the same ``content``. One call at a time."""
        ...

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep all ``records``, pairs of key and content, or raise. They are kept when the call returns.

        The call waits while there is no room. It may be cancelled, and repeated.
        """
        ...

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the record of each key, None for one that is lost. Raises if a record cannot be read now."""
        ...

    async def read(self, key: bytes, into: memoryview) -> bool:
        """Fill ``into`` (bytes) with the beginning of the record of ``key``, without another copy of it.

        Returns False if the record is lost, or shorter. Raises if it cannot be read now.
        """
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the records of ``keys``. Unknown keys are ignored."""
        ...
