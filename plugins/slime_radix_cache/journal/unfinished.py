"""Sessions with a running stream or an unanswered request, in files that the next start reads."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_radix_cache.index.losses import Digest, Marks, digest_of

__all__ = ["SessionFile", "UnansweredSessions", "UnfinishedStreams"]

#: How many sessions a file has room for. The file takes 1 MiB.
_SLOTS = 1 << 16
_SLOT = struct.Struct("<QQ")
_FREE: Digest = (0, 0)
#: The name that stands for streams without a session; no session has this name.
_NO_SESSION = ""


class SessionFile:
    """A file with slots for sessions. ``left``: slots that a former process did not free, with digests of the sessions.

    Raises OSError and ValueError.
    """

    def __init__(self, path: Path, *, slots: int = _SLOTS) -> None:
        size = slots * _SLOT.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size == 0:
                os.posix_fallocate(fd, 0, size)
            if os.fstat(fd).st_size != size:
                raise ValueError(f"wanted {size} bytes of sessions, got {os.fstat(fd).st_size}")
            self._mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.left = dict(self._taken())
        self._free = [slot for slot in range(slots) if slot not in self.left]

    def _taken(self) -> Iterator[tuple[int, Digest]]:
        for slot, (first, second) in enumerate(_SLOT.iter_unpack(self._mapped)):
            if (first, second) != _FREE:
                yield slot, (first, second)

    def take(self, session: str) -> int | None:
        """Take a slot for ``session`` and return it; None if all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        _SLOT.pack_into(self._mapped, slot * _SLOT.size, *digest_of(session))
        return slot

    def free(self, slot: int) -> None:
        """Free ``slot``."""
        _SLOT.pack_into(self._mapped, slot * _SLOT.size, *_FREE)
        self._free.append(slot)


class UnfinishedStreams:
    """Sessions with running streams. A stream is recorded when it ends, or when a request or a retrieval needs it.

    A large answer that is passed on while it comes counts as a stream, too, and is recorded at its end.

    Streams that ran when a former process ended are lost: ``sessions`` gets a mark for each session. The lost text is
    not known, so ``texts`` gets a mark, too. Once ``texts`` has a mark, the number of known contexts of any text is a
    lower bound: a lost stream may have had the same text.
    """

    def __init__(self, file: SessionFile, sessions: Marks, texts: Marks) -> None:
        self._file = file
        self._sessions = sessions
        self._texts = texts
        for slot, digest in file.left.items():
            if digest != digest_of(_NO_SESSION):
                sessions.add_digest(digest)
            texts.add(b"")
            file.free(slot)

    def begin(self, session: str | None) -> Callable[[], None]:
        """Note that a stream of ``session`` (None: it has no session) runs. Returns a function that notes its end.

        If the file has no room, the stream counts as lost at once.
        """
        slot = self._file.take(session if session is not None else _NO_SESSION)
        if slot is None:
            if session is not None:
                self._sessions.add(session)
            self._texts.add(b"")
            return lambda: None
        return lambda: self._file.free(slot)


class UnansweredSessions:
    """Sessions with a request, running or ended, that has no recorded answer.

    Such a request does not by itself mean that tokens of the session are lost.
    ``in`` is true only for sessions of former processes, whose requests are not known any more. If the file is full,
    a former session is marked in ``lost`` and gives up its slot to the new session. If there is no former session, the
    new session is marked.
    """

    def __init__(self, file: SessionFile, lost: Marks) -> None:
        self._file = file
        self._lost = lost
        self._former: dict[Digest, int] = {}
        for slot, digest in file.left.items():
            if self._former.setdefault(digest, slot) != slot:
                file.free(slot)
        self._slots: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    def __contains__(self, session: object) -> bool:
        return isinstance(session, str) and bool(self._former) and digest_of(session) in self._former

    def begin(self, session: str) -> None:
        """Note that a request of ``session`` begins."""
        self._requests[session] = self._requests.get(session, 0) + 1
        if session in self._slots or session in self:
            return
        slot = self._file.take(session)
        if slot is None and self._former:
            former, freed = self._former.popitem()
            self._lost.add_digest(former)
            self._file.free(freed)
            slot = self._file.take(session)
        if slot is None:
            self._lost.add(session)
        else:
            self._slots[session] = slot

    def end(self, session: str, *, is_remembered: bool) -> None:
        """Note that a request of ``session`` ends. ``is_remembered``: ``index.unanswered`` has one of its requests."""
        self._requests[session] -= 1
        if not self._requests[session]:
            del self._requests[session]
            if not is_remembered:
                self.forget(session)

    def forget(self, session: str) -> None:
        """Free the slot of ``session``, which has no remembered request. While a request of it runs, do nothing."""
        if session in self._slots and session not in self._requests:
            self._file.free(self._slots.pop(session))
