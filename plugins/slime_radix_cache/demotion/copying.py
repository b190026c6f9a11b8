"""Notes about records that are still being copied from the disk of one router to the store that routers share.

The router writes them as a run of their own, in this order:

1. A Copying note, and a Begun note for each session of the records. To other routers, these sessions are not complete.
2. All that the log on the disk says about the records. Other routers do not use these records yet.
3. Another Copying note, which names the earlier runs that this run replaces: those of copies that were interrupted.
4. After the last copy, an Ended note. From then on, other routers use the records.

A router that ends in between begins the copy again, as another run, at its next start with this disk.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Any

from router_core.errors import RouterError
from slime_radix_cache.demotion.notes import Begun, Copying, Dropped, Ended, RunBegun, packed

__all__ = ["CLOSING", "Copies", "NotCopied", "beginnings_of", "opening"]

#: The number of bytes of a beginning. All keys of one process have the same beginning.
_BEGINNING_BYTES = 8
#: How many notes are written together.
_TOGETHER = 4096
#: The last note of a copy.
CLOSING = packed([Ended()])


class NotCopied(RouterError):
    """A record is not in the store yet. Another router copies it there from its disk."""

    def __init__(self, key: bytes) -> None:
        super().__init__(
            f"the record {key.hex()} is not in the store yet: a router copies it there from its --store-ssd"
        )


class Copies:
    """Copies that have begun and not ended: the runs of their notes, each with the beginnings of the records' keys."""

    def __init__(self) -> None:
        self._beginnings: dict[bytes, frozenset[bytes]] = {}

    def __len__(self) -> int:
        return len(self._beginnings)

    def __contains__(self, run: bytes) -> bool:
        return run in self._beginnings

    def begin(self, run: bytes, note: Copying) -> None:
        """Add the copy of ``run``."""
        self._beginnings[run] = frozenset(note.beginnings)

    def end(self, run: bytes) -> None:
        """Remove the copy of ``run``, if there is one."""
        self._beginnings.pop(run, None)

    def may_bring(self, key: bytes) -> bool:
        """Return True if a copy of the record of ``key`` may still come."""
        return any(key[:_BEGINNING_BYTES] in each for each in self._beginnings.values())

    def of(self, beginnings: Container[bytes]) -> list[bytes]:
        """Return the runs of copies that have one of ``beginnings``, or that have no beginning at all."""
        return [
            run for run, own in self._beginnings.items() if not own or any(one in beginnings for one in own)
        ]


def beginnings_of(keys: Iterable[bytes]) -> frozenset[bytes]:
    """Return the beginnings of ``keys``, for a Copying note."""
    return frozenset(key[:_BEGINNING_BYTES] for key in keys)


def opening(
    begun: RunBegun, beginnings: Iterable[bytes], sessions: Iterable[str], facts: Iterable[bytes],
    gone: Iterable[bytes], replaces: Iterable[bytes],
) -> Iterator[bytes]:  # fmt: skip
    """Yield the notes of a copy, except the last one (``CLOSING``), as bytes.

    ``facts``: what the log on the disk says. ``replaces``: the runs of earlier copies that this copy replaces.
    ``gone``: keys of records that those copies were to bring, and that are not on the disk any more.
    """
    keys = tuple(sorted(beginnings))
    yield from _packed(iter([begun, Copying(keys, ()), *map(Begun, sessions)]))
    yield from facts
    yield from _packed(map(Dropped, gone))
    yield packed([Copying(keys, tuple(replaces))])


def _packed(notes: Iterator[Any]) -> Iterator[bytes]:
    while some := list(islice(notes, _TOGETHER)):
        yield packed(some)
