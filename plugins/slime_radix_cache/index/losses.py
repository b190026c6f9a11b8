"""Marks of what was lost: in bounded memory, and none is ever forgotten.

The latest marks are counted exactly. All of them are in a Bloom filter too (B. H. Bloom, CACM 13, 1970), which may
say yes to what was never marked and never says no to what was. With a file the filter outlives the process: its
pages are the kernel's, as those of the trajectory log are.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Container
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from slime_journal.record_files import LogDirectory

__all__ = ["Count", "Digest", "Losses", "Marks", "digest_of", "opened"]

T = TypeVar("T")

#: Marks of which it is known how many there are.
_EXACT = 16_384
#: Bits of a filter, and bits that a mark sets: 8 MiB. False alarms: 1 in 2.5 million at a million marks, 1 in 450 at
#: five million, 1 in 24 at ten million.
_BITS = 1 << 26
_PROBES = 6
_MAGIC = b"slime-router marks 1\n"
_HEADER = struct.Struct("<32sQQQ")  # magic, bits, probes, marks


#: Of a key, in all processes. The second number is odd.
Digest: TypeAlias = tuple[int, int]


class Count(NamedTuple):
    """Number of marks. ``at_least``: older marks may not be counted, or were never made."""

    number: int
    at_least: bool


class Marks:
    """A set of marked keys that only grows. The filter is made at the first mark, or read from ``path``."""

    def __init__(self, path: Path | None = None, *, exact: int = _EXACT, bits: int = _BITS) -> None:
        self.number = 0
        self._exact = exact
        self._bits = bits
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._filter: bytearray | memoryview | None = None
        self._header: memoryview | None = None
        #: The filter has marks that are not counted: of a former process, or too many.
        self._has_uncounted = False
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        """Map the file. Its blocks are allocated now, so that a full disk is an error here and no signal later."""
        size = _HEADER.size + self._bits // 8
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_new = os.fstat(fd).st_size == 0
            if is_new:
                os.posix_fallocate(fd, 0, size)
            elif os.fstat(fd).st_size != size:
                raise ValueError(f"wanted {size} bytes of marks, got {os.fstat(fd).st_size}")
            mapped = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        head = (_MAGIC.ljust(32, b"\0"), self._bits, _PROBES)
        if is_new:
            _HEADER.pack_into(mapped, 0, *head, 0)
        *told, self.number = _HEADER.unpack_from(mapped)
        if tuple(told) != head:
            raise ValueError(f"wanted a file that begins with {_MAGIC.decode().strip()!r}")
        self._header, self._filter = mapped[: _HEADER.size], mapped[_HEADER.size :]
        self._has_uncounted = self.number > 0

    def add(self, key: str | bytes) -> None:
        """Mark ``key``."""
        self.add_digest(digest_of(key))

    def add_digest(self, digest: Digest) -> None:
        """Mark the key that has this ``digest``."""
        if self._filter is None:
            self._filter = bytearray(self._bits // 8)
        if not self._is_in_filter(digest):
            self.number += 1
            self._set(digest)
        recent = self._recent
        recent[digest[0]] = recent.pop(digest[0], 0) + 1
        if len(recent) > self._exact:
            recent.popitem(last=False)
            self._has_uncounted = True

    def _set(self, digest: Digest) -> None:
        marks = self._filter
        assert marks is not None  # narrowing: made before the first mark
        for place in self._places(digest):
            marks[place >> 3] |= 1 << (place & 7)
        if self._header is not None:
            _HEADER.pack_into(self._header, 0, _MAGIC.ljust(32, b"\0"), self._bits, _PROBES, self.number)

    def __contains__(self, key: str | bytes) -> bool:
        return self.number > 0 and self._is_in_filter(digest_of(key))

    def count(self, key: str | bytes) -> Count:
        """Count the marks of ``key``."""
        if not self.number:
            return Count(0, at_least=False)
        digest = digest_of(key)
        counted = self._recent.get(digest[0], 0)
        uncounted = self._has_uncounted and self._is_in_filter(digest)
        return Count(max(counted, int(uncounted)), at_least=uncounted)

    @property
    def size_bytes(self) -> int:
        """Memory of the filter, and of what is counted."""
        return (len(self._filter) if self._filter is not None else 0) + 140 * len(self._recent)

    @property
    def false_alarm_rate(self) -> float:
        """Share of keys that were never marked and are called so."""
        return (1 - math.exp(-_PROBES * self.number / self._bits)) ** _PROBES

    def as_dict(self) -> dict[str, float]:
        """Its size, ready for JSON."""
        return {
            "marks": self.number,
            "bytes": self.size_bytes,
            "false_alarm_rate": self.false_alarm_rate,
        }

    def _is_in_filter(self, digest: Digest) -> bool:
        marks = self._filter
        return marks is not None and all(
            marks[place >> 3] >> (place & 7) & 1 for place in self._places(digest)
        )

    def _places(self, digest: Digest) -> list[int]:
        """Kirsch and Mitzenmacher, 2006: two hashes are as good as six."""
        first, second = digest
        return [(first + number * second) % self._bits for number in range(_PROBES)]


class Losses:
    """Marks of all that was evicted or could not be recorded: ``sessions`` by name, ``texts`` in UTF-8.

    ``asked``: sessions of which a former process knew what they had asked without an answer.
    """

    def __init__(
        self, sessions: Marks | None = None, texts: Marks | None = None, asked: Container[str] = ()
    ) -> None:
        self.sessions = sessions if sessions is not None else Marks()
        self.texts = texts if texts is not None else Marks()
        self.asked = asked

    def __contains__(self, session: str) -> bool:
        """True when it is not known any more what ``session`` was answered, or what it asked."""
        return session in self.sessions or session in self.asked

    def add(self, session: str) -> None:
        """Remember that something of ``session`` is lost."""
        self.sessions.add(session)


def opened(directory: LogDirectory, name: str, read: Callable[[Path], T]) -> T:
    """Open the file ``name`` in ``directory`` by ``read``. Raises StartupError."""
    path = directory.path / name
    try:
        return read(path)
    except OSError as error:
        raise directory.refused(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise directory.refused(f"{path}: {error}; move it away to go on without knowing it") from None


def digest_of(key: str | bytes) -> Digest:
    """The same in each process, unlike ``hash``."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    first, second = struct.unpack("<QQ", blake2b(data, digest_size=16).digest())
    return first, second | 1
