"""Contract of the component ``"cold_store"``, which another plugin offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["ColdStore", "StoredNote"]


class StoredNote(Protocol):
    """One or more notes of one run, joined in ``content``. ``run``: the run's name. Notes and runs: see ColdStore.

    ``place``: the place of the notes, for error messages. ``damage``: the reason why no content could be read, or "".
    """

    @property
    def run(self) -> bytes: ...
    @property
    def place(self) -> str: ...
    @property
    def content(self) -> bytes: ...
    @property
    def damage(self) -> str: ...


class ColdStore(Protocol):
    """A store of records that have no room in memory. A record is a byte string under a key of 16 bytes.

    Records never change. ``wait_s``: longest time, in seconds, that a record may wait until it is kept.
    ``stops_on_loss``: the router ends when a kept record is lost. ``keeps_notes``: records and *notes*
    outlive the router. Notes are byte strings about records, and are read in the order of writing. ``is_shared``: other
    routers may keep records and notes in the same store.

    ``was_deleted(key)``: set this function if the store is shared. The store calls it for a record that is missing.
    The function returns True if a router has dropped the record, and raises if that cannot be known now.

    ``session_of(key)``: set this to a function that returns the session of a record, None if it is not known. If a
    record is lost, the store names its session in the message.

    A *run* is one router process, from its start to its end. ``run``: the name of this run, 11 bytes; names of later
    runs are greater. Call :meth:`notes`, :meth:`mend_notes` (if notes are damaged), :meth:`adopt`,
    :meth:`replace_notes`, :meth:`shorten_notes` and :meth:`copy` in this order, before all other methods. The store
    opens before the lifespans of other plugins begin, and closes after they end.
    """

    wait_s: float
    stops_on_loss: bool
    run: bytes
    was_deleted: Callable[[bytes], Awaitable[bool]]
    session_of: Callable[[bytes], str | None]

    @property
    def keeps_notes(self) -> bool: ...

    @property
    def is_shared(self) -> bool: ...

    async def notes(self) -> Sequence[StoredNote]:
        """Return the notes of earlier runs, earliest first, and begin the notes of this run. Raises StartupError.

        If ``stops_on_loss`` is False, damaged notes are returned, too. If there are any, call :meth:`mend_notes`.
        """
        ...

    async def mend_notes(
        self, notes: Sequence[Any], damage: Sequence[str], contents: Mapping[str, bytes]
    ) -> Sequence[StoredNote]:
        """Write ``contents`` over damaged notes, and return ``notes`` with these contents. Raises StartupError.

        ``notes``: the result of :meth:`notes`. ``contents``: the new contents, by the place of the notes. ``damage``:
        place and reason of each damage, which counts as a loss.
        """
        ...

    @property
    def uncopied(self) -> Sequence[StoredNote]:
        """The notes in :meth:`notes` about records that are in another tier of this router.

        The shared store may lack these records. If there are such notes, call :meth:`copy`.
        """
        ...

    async def copy(self, opening: Iterable[bytes], closing: bytes) -> None:
        """Copy the records of ``uncopied`` to the shared store, in the background.

        The notes ``opening`` are written before the call returns, as notes of a run of their own; other routers read
        them, and :meth:`news` does not return them. That run ends with the note ``closing``, which is written when all
        records are copied. Raises if a note cannot be written.
        """
        ...

    async def adopt(self, sizes: Mapping[bytes, int]) -> Sequence[bytes]:
        """Keep the records of earlier runs that ``sizes`` (bytes by key) names.

        Other records are dropped, unless the store is shared. Returns those keys in ``sizes`` whose records are known
        to be missing: they are lost. Raises StartupError if records are lost and ``stops_on_loss`` is set.
        """
        ...

    def damaged(self, key: bytes) -> None:
        """Count the record of ``key`` as lost: :meth:`fetch` returned it, and its content is damaged.

        The router ends if ``stops_on_loss`` is set.
        """
        ...

    async def news(self) -> Sequence[StoredNote]:
        """Return the notes that other routers wrote since the last call, or raise. May repeat earlier notes."""
        ...

    def learn(self, sizes: Mapping[bytes, int]) -> None:
        """Make records of other routers readable by :meth:`fetch`. ``sizes``: their sizes in bytes, by key."""
        ...

    def unlearn(self, keys: Sequence[bytes]) -> None:
        """Undo :meth:`learn`: this router does not need the records of ``keys`` any more, but other routers may."""
        ...

    async def replace_notes(self, contents: Iterable[bytes]) -> None:
        """Replace the notes of earlier runs by ``contents``. Does nothing in a shared store. Raises StartupError."""
        ...

    async def shorten_notes(
        self, notes: Sequence[Any], shortened: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> None:
        """Shorten the notes of earlier runs in a shared store, where other routers may read them. Logs a failure.

        ``notes``: the result of :meth:`notes`. ``shortened`` is called with the contents of the notes of one run, and
        returns as many new contents.
        """
        ...

    async def note(self, content: bytes) -> None:
        """Append a note, or raise. After an error, the next call must have the same ``content``. One call at a time."""
        ...

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep all ``records``, pairs of key and content, or raise. After the return, all of them are kept.

        The call waits while there is no room. It may be cancelled, and repeated.
        """
        ...

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return each key's record; None if it is lost, deleted or unknown. Raises if a record cannot be read now."""
        ...

    async def holds(self, key: bytes) -> bool:
        """Return False if the record of ``key`` is unknown or seems to be lost. Raises if the store cannot answer now.

        This does not read the record. Only :meth:`read` shows for certain whether it is lost.
        """
        ...

    async def read(self, key: bytes, into: memoryview) -> bool:
        """Fill ``into`` with the first bytes of the record of ``key``, without another copy.

        Returns False if the record is lost, deleted, unknown or shorter than ``into``. Raises if it cannot be read now.
        """
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the records of ``keys``. Unknown keys are ignored."""
        ...
