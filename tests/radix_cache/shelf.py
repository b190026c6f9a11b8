"""A store of demoted trajectories in a dict, the plugin that offers it, and a memory with room for nothing."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import anyio.lowlevel

from deadlines import until
from router_core import hookimpl
from router_core.router import Router
from router_core.types import ASGIApp, Receive, Scope, Send
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories

__all__ = ["ALL_DEMOTED", "DemoteFirst", "Shelf", "make_plugin"]

#: Flags: each request finds all demoted that no other request holds.
ALL_DEMOTED = (
    "--middleware-paths", "radix_cache.shelf", "radix_cache.shelf.DemoteFirst", "--radix-tree-max-size", "1",
)  # fmt: skip


class Note(NamedTuple):
    run: bytes
    place: str
    content: bytes
    damage: str = ""


class Shelf:
    """Keeps records. ``refuses``: it keeps nothing more; ``is_closed``: nothing is read. ``refused``: failed writes.

    ``keeps_notes``: with :meth:`again`, records and notes outlive a router. ``uncopied``: notes of another store, whose
    records are here after :meth:`end_copy`.
    """

    was_deleted: Callable[[bytes], Awaitable[bool]]
    session_of: Callable[[bytes], str | None]

    def __init__(
        self, *, wait_s: float = 30.0, stops_on_loss: bool = False, keeps_notes: bool = False
    ) -> None:
        self.records: dict[bytes, bytes] = {}
        self.written: list[Note] = []
        self.run = bytes(11)
        self.keeps_notes = keeps_notes
        self.is_shared = False
        self.seen = 0
        self.wait_s = wait_s
        self.stops_on_loss = stops_on_loss
        self.refuses = False
        self.is_closed = False
        self.refused = self.num_damaged = 0
        self.uncopied: list[Note] = []
        self.copy_run = self.closing = b""
        self.damage: Sequence[str] = ()

    @hookimpl
    def setup(self, router: Router) -> None:
        router.components.register("cold_store", self)

    def beside(self) -> Shelf:
        """Return the same store for another router that runs at the same time."""
        other = Shelf(wait_s=self.wait_s, keeps_notes=True)
        other.records, other.written, other.run = self.records, self.written, self.run
        self.is_shared = other.is_shared = True
        return other

    async def news(self) -> Sequence[Note]:
        new, self.seen = self.written[self.seen :], len(self.written)
        return [note for note in new if note.run not in (self.run, self.copy_run)]

    def learn(self, sizes: Mapping[bytes, int]) -> None:
        """All records can be fetched anyway."""

    def unlearn(self, keys: Sequence[bytes]) -> None:
        """No record takes room."""

    def again(self) -> Shelf:
        """Return what another router would find now."""
        other = Shelf(wait_s=self.wait_s, stops_on_loss=self.stops_on_loss, keeps_notes=self.keeps_notes)
        other.records, other.written, other.run = dict(self.records), list(self.written), self.run
        return other

    async def notes(self) -> Sequence[Note]:
        latest = max([self.run, *(note.run for note in self.written)])
        self.run = (int.from_bytes(latest[:8], "big") + 1).to_bytes(8, "big") + bytes(3)
        self.seen = len(self.written)
        return list(self.written)

    async def mend_notes(
        self, notes: Sequence[Note], damage: Sequence[str], contents: Mapping[str, bytes]
    ) -> list[Note]:
        self.damage = damage

        def mended(note: Note) -> Note:
            return note._replace(content=contents[note.place], damage="") if note.place in contents else note

        self.written = [*map(mended, self.written)]
        return [*map(mended, notes)]

    async def note(self, content: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self.refuses:
            raise OSError("no space left on the shelf")
        self.written.append(Note(self.run, f"note {len(self.written)}", content))

    def as_others_see(self, disk: Shelf) -> Shelf:
        """Return this store for another router, without the records and notes of ``disk`` that are copied to it."""
        other = Shelf(keeps_notes=True)
        other.is_shared, other.run, other.copy_run = True, self.run, self.copy_run
        other.written = [note for note in self.written if note not in disk.written]
        other.closing, other.records = self.closing, dict(self.records.items() - disk.records.items())
        return other

    async def copy(self, opening: Iterable[bytes], closing: bytes) -> None:
        copy_run = self.uncopied[-1].run[:-1] + bytes([len(self.written)])
        self.written += [Note(copy_run, f"copied note {place}", each) for place, each in enumerate(opening)]
        self.copy_run, self.closing = copy_run, closing

    def end_copy(self, records: Mapping[bytes, bytes]) -> None:
        self.records |= records
        self.written.append(Note(self.copy_run, "the last copied note", self.closing))

    async def replace_notes(self, contents: Iterable[bytes]) -> None:
        if self.keeps_notes and not self.is_shared:
            self.written = [Note(self.run, "whole", content) for content in contents]

    async def shorten_notes(
        self, notes: Sequence[Note], shortened: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> None:
        if not self.is_shared:
            return
        for run in dict.fromkeys(note.run for note in notes):
            places = [place for place, note in enumerate(self.written) if note.run == run]
            contents = shortened([self.written[place].content for place in places])
            for place, content in zip(places, contents, strict=True):
                self.written[place] = self.written[place]._replace(content=content)

    async def adopt(self, sizes: Mapping[bytes, int]) -> Sequence[bytes]:
        if not self.is_shared:
            self.records = {key: self.records[key] for key in sizes if key in self.records}
        assert all(len(self.records.get(key, bytes(size))) == size for key, size in sizes.items())
        return [key for key in sizes if key not in self.records and not self.is_shared]

    def damaged(self, key: bytes) -> None:
        self.num_damaged += 1

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        await anyio.lowlevel.checkpoint()
        if self.refuses:
            self.refused += 1
            raise OSError("no space left on the shelf")
        for key, content in records:
            assert self.records.setdefault(key, content) == content, "a record never changes"
        await anyio.lowlevel.checkpoint()

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        await anyio.lowlevel.checkpoint()
        if self.is_closed:
            raise OSError("the shelf is closed")
        for key in keys if self.is_shared else ():
            if key not in self.records:
                await self.was_deleted(key)
        return [self.records.get(key) for key in keys]

    async def holds(self, key: bytes) -> bool:
        (content,) = await self.fetch([key])
        return content is not None

    async def read(self, key: bytes, into: memoryview) -> bool:
        (content,) = await self.fetch([key])
        if content is None or len(content) < len(into):
            return False
        into[:] = content[: len(into)]
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.records.pop(key, None)


class DemoteFirst:
    """Middleware that lets each HTTP request wait until nothing is left to demote."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self._app = app
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            cold: ColdTrajectories = self._router.components.get("ownership")
            cold.check()
            await until(lambda: not cold._trajectories.overdue(1))
        await self._app(scope, receive, send)


def make_plugin(options: argparse.Namespace) -> Shelf:
    return Shelf()
