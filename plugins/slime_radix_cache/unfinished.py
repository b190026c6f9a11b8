"""Sessions that are told a stream: what it has told is lost if the process is killed, and that is remembered.

A stream is recorded when it ends, or when somebody asks for what it has told. Its session stands in a file until then,
which is read at the next start.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

from slime_radix_cache.losses import Digest, Marks, digest_of

__all__ = ["UnfinishedStreams"]

#: Streams at one time that the file has room for: 1 MiB.
_SLOTS = 1 << 16
_SLOT = struct.Struct("<QQ")
_FREE: Digest = (0, 0)


class UnfinishedStreams:
    """Slots of a file, one for each running stream of a session. ``lost`` gets those that a former process left.

    Raises OSError and ValueError.
    """

    def __init__(self, path: Path, lost: Marks, *, slots: int = _SLOTS) -> None:
        self._lost = lost
        size = slots * _SLOT.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size == 0:
                os.posix_fallocate(fd, 0, size)
            if os.fstat(fd).st_size != size:
                raise ValueError(f"wanted {size} bytes of sessions, got {os.fstat(fd).st_size}")
            self._slots = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        for place, digest in enumerate(_SLOT.iter_unpack(self._slots)):
            if digest != _FREE:
                lost.add_digest((digest[0], digest[1]))
                _SLOT.pack_into(self._slots, place * _SLOT.size, *_FREE)
        self._free = list(range(slots))

    def begin(self, session: str) -> Callable[[], None]:
        """``session`` is told a stream until the function returned is called.

        Where there is no room, something of it counts as lost at once.
        """
        if not self._free:
            self._lost.add(session)
            return lambda: None
        place = self._free.pop()
        _SLOT.pack_into(self._slots, place * _SLOT.size, *digest_of(session))
        return lambda: self._end(place)

    def _end(self, place: int) -> None:
        _SLOT.pack_into(self._slots, place * _SLOT.size, *_FREE)
        self._free.append(place)
