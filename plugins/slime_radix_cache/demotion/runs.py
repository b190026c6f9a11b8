"""Serials of segments, and the keys of their records, over all runs of the router."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Runs", "counter_of"]

_RUN_BYTES = 11
_COUNTER_BITS = 40
_COUNTER = (1 << _COUNTER_BITS) - 1


def counter_of(serial: int) -> int:
    """Return the number of a segment within its run, from 1."""
    return serial & _COUNTER


class Runs:
    """The names of the runs. A run is one router process.

    The list has the runs that were known at the start, earliest first, then this run, and then runs of other routers
    in the order in which they become known.
    A serial consists of the place of its run in this list and of a counter. The key of a record consists of the name of
    the run (11 bytes) and the counter. The serials of one run are in the order of recording. A serial is valid in this
    process only.
    """

    def __init__(self) -> None:
        self._names = [bytes(_RUN_BYTES)]
        self._places = {self._names[0]: 0}
        self._own = 0
        self._next = 1

    def begin(self, earlier: Iterable[bytes], name: bytes) -> None:
        """Begin the run ``name``. ``earlier``: keys of earlier runs' records. Call this before :meth:`next_serial`."""
        self._names = [*sorted({key[:_RUN_BYTES] for key in earlier}), name]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._own = len(self._names) - 1
        self._next = (self._own << _COUNTER_BITS) + 1

    def add(self, key: bytes) -> None:
        """Add the run of the router that wrote the record ``key``, if it is not known."""
        name = key[:_RUN_BYTES]
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def knows(self, key: bytes) -> bool:
        """Return True if the run of the router that wrote the record ``key`` is known."""
        return key[:_RUN_BYTES] in self._places

    def is_own(self, serial: int) -> bool:
        """Return True if this run recorded the segment with ``serial``."""
        return serial >> _COUNTER_BITS == self._own

    def next_serial(self) -> int:
        """Return a new serial of this run."""
        self._next += 1
        return self._next - 1

    def key(self, serial: int) -> bytes:
        """Return the key of the record with ``serial``; empty for 0, which stands for no segment."""
        if not serial:
            return b""
        return self._names[serial >> _COUNTER_BITS] + counter_of(serial).to_bytes(5, "big")

    def serial(self, key: bytes) -> int:
        """Return the serial of the record with ``key``, whose run is known; 0 for an empty key."""
        return (
            self._places[key[:_RUN_BYTES]] << _COUNTER_BITS | int.from_bytes(key[_RUN_BYTES:], "big")
            if key
            else 0
        )
