"""Marks of losses, in bounded memory. No mark is ever dropped.

The latest marks are counted exactly. All marks are also in a Bloom filter (B. H. Bloom, CACM 13, 1970), which has
false positives but no false negatives. A filter in a mapped file outlives the process, since the kernel writes the
pages to the file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from slime_journal.record_files import LogDirectory

__all__ = ["Count", "Digest", "Losses", "Marks", "digest_of", "digests_in", "opened", "packed_digests"]

T = TypeVar("T")

#: Number of latest keys that are counted exactly.
_EXACT = 16_384
#: Bits of a filter (8 MiB), and bits that a mark sets. False positives: 1 in 2.5 million with a million marks, 1 in 450
#: with five million, 1 in 24 with ten million.
_BITS = 1 << 26
_PROBES = 6
_MAGIC = b"slime-router marks 1\n"
_HEADER = struct.Struct("<32sQQQ")  # magic, bits, probes, marks


#: The digest of a key, equal in all processes. The second number is odd.
Digest: TypeAlias = tuple[int, int]


class Count(NamedTuple):
    """A number of marks or contexts. ``at_least``: there may be more."""

    number: int
    at_least: bool


class Marks:
    """A set of marked keys that only grows. The filter is created with the first mark, or is the file ``path``."""

    def __init__(self, path: Path | None = None, *, exact: int = _EXACT, bits: int = _BITS) -> None:
        self.number = 0
        #: Called with the digest of each new mark.
        self.on_mark: Callable[[Digest], None] = lambda digest: None
        self._exact = exact
        self._bits = bits
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._filter: bytearray | memoryview | None = None
        self._header: memoryview | None = None
        #: The filter has marks that are not counted exactly: from a former process, or no longer recent.
        self._has_uncounted = False
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        """Map the file. A new file is allocated as a whole: a full disk is an error here, not a SIGBUS later.

        The header is on the disk before the first mark. So a file of zeros, which a kill may leave, never had a mark.
        """
        size = _HEADER.size + self._bits // 8
        head = (_MAGIC.ljust(32, b"\0"), self._bits, _PROBES)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_new = os.fstat(fd).st_size == 0
            if is_new:
                os.posix_fallocate(fd, 0, size)
            elif os.fstat(fd).st_size != size:
                raise ValueError(f"wanted {size} bytes of marks, got {os.fstat(fd).st_size}")
            if is_new or _is_zero(fd, size):
                os.pwrite(fd, _HEADER.pack(*head, 0), 0)
                os.fsync(fd)
            mapped = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        *found, self.number = _HEADER.unpack_from(mapped)
        if tuple(found) != head:
            raise ValueError(f"wanted marks of this version, with header {head}, got {tuple(found)}")
        self._header, self._filter = mapped[: _HEADER.size], mapped[_HEADER.size :]
        self._has_uncounted = self.number > 0

    def add(self, key: str | bytes | Digest) -> None:
        """Mark ``key``, or the key that has this digest."""
        self.add_digest(key if isinstance(key, tuple) else digest_of(key))

    def add_digest(self, digest: Digest) -> None:
        """Mark the key that has this ``digest``."""
        if self._filter is None:
            self._filter = bytearray(self._bits // 8)
        if not self._is_in_filter(digest):
            self.number += 1
            self._set(digest)
            self.on_mark(digest)
        recent = self._recent
        recent[digest[0]] = recent.pop(digest[0], 0) + 1
        if len(recent) > self._exact:
            recent.popitem(last=False)
            self._has_uncounted = True

    def _set(self, digest: Digest) -> None:
        marks = self._filter
        assert marks is not None  # narrowing: created before the first mark
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
        """Memory of the filter and of the exact counts."""
        return (len(self._filter) if self._filter is not None else 0) + 140 * len(self._recent)

    @property
    def false_alarm_rate(self) -> float:
        """Expected share of false positives among keys that were never marked."""
        return (1 - math.exp(-_PROBES * self.number / self._bits)) ** _PROBES

    def as_dict(self) -> dict[str, float]:
        """Return the number of marks, their memory and the false alarm rate, ready for JSON."""
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
        """Return the bits of ``digest``, by double hashing (Kirsch and Mitzenmacher, 2006)."""
        first, second = digest
        return [(first + number * second) % self._bits for number in range(_PROBES)]


def _is_zero(fd: int, size: int) -> bool:
    """Return True if all ``size`` bytes of the file are zero. Reads only the header if the header is not zero."""
    return not any(os.pread(fd, _HEADER.size, 0)) and os.pread(fd, size, 0) == bytes(size)


class Losses:
    """Marks of what is not fully or exactly known: ``sessions`` by name, ``texts`` in UTF-8.

    ``asked``: sessions with unanswered requests in a former process. ``open``: sessions that may have more responses
    in another router.
    """

    def __init__(
        self, sessions: Marks | None = None, texts: Marks | None = None, asked: Container[str] = ()
    ) -> None:
        self.sessions = sessions if sessions is not None else Marks()
        self.texts = texts if texts is not None else Marks()
        self.asked = asked
        self.open: Container[str] = ()

    def __contains__(self, session: str) -> bool:
        """Return True if ``session`` may have responses or unanswered requests that are not known here."""
        return session in self.sessions or session in self.asked or session in self.open

    def add(self, session: str) -> None:
        """Mark ``session``, which lost a response."""
        self.sessions.add(session)


def opened(directory: LogDirectory, name: str, read: Callable[[Path], T]) -> T:
    """Open the file ``name`` in ``directory`` with ``read``. Raises StartupError."""
    path = directory.path / name
    try:
        return read(path)
    except OSError as error:
        raise directory.refused(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise directory.refused(f"{path}: {error}; move it away to start without these marks") from None


def digest_of(key: str | bytes) -> Digest:
    """Return the digest of ``key``. Unlike ``hash``, it is the same in each process."""
    return next(digests_in(packed_digests(key)))


def packed_digests(*keys: str | bytes) -> bytes:
    """Return the digests of ``keys``, packed: 16 bytes for each key."""
    encoded = (key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key for key in keys)
    return b"".join(blake2b(key, digest_size=16).digest() for key in encoded)


def digests_in(packed: bytes) -> Iterator[Digest]:
    """Yield the digests in ``packed``."""
    for first, second in struct.iter_unpack("<QQ", packed):
        yield first, second | 1
