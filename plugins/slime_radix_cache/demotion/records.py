"""Records of demoted segments as bytes, and the places in texts that lead to such segments."""

from __future__ import annotations

from slime_journal.record_frames import Damaged, Frames, Torn
from slime_radix_cache.demotion.directory import ANY_BYTE, TextPlace
from slime_radix_cache.demotion.runs import counter_of
from slime_radix_cache.index.prefix_digests import extended
from slime_radix_cache.journal.log_records import Answered, Asked

__all__ = ["packed_record", "place_of", "read_record"]

_FRAMES = Frames((Asked, Answered))


def packed_record(record: Asked | Answered) -> bytes:
    """Return ``record`` as bytes, with a checksum."""
    return b"".join(_FRAMES.write([record]))


def read_record(content: bytes | None, serial: int) -> Asked | Answered | None:
    """Return the record in ``content``; None if it is missing or damaged, or its counter is not that of ``serial``.

    The other part of a serial, the place of the run (see Runs), may differ between processes.
    """
    try:
        records = [record for *_, some in _FRAMES.read(memoryview(content or b"")) for record in some]
    except (Torn, Damaged):
        return None
    if len(records) != 1 or counter_of(records[0].serial) != counter_of(serial):
        return None
    record: Asked | Answered = records[0]
    return record


def place_of(text: bytes, place: int) -> TextPlace:
    """Return the TextPlace after the first ``place`` bytes of ``text``."""
    last = text[place - 1] if place else 0
    return TextPlace(extended(0, text[:place], "uint8"), last, text[place] if place < len(text) else ANY_BYTE)
