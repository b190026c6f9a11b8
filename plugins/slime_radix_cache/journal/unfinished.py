"""Sessions with something unfinished: in files that are read at the next start, for the process may be killed."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_radix_cache.index.losses import Digest, Marks, digest_of

__all__ = ["SessionFile", "UnansweredSessions", "UnfinishedStreams"]

#: Sessions at one time that a file has room for: 1 MiB.
_SLOTS = 1 << 16
_SLOT = struct.Struct("<QQ")
_FREE: Digest = (0, 0)
#: Stands for a client without a session: no session has this name.
_NOBODY = ""


class SessionFile:
    """A file with a slot for each of some sessions. ``left``: the slots that a former process left, and who is there.

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
        """A slot for ``session``; None: there is no room."""
        if not self._free:
            return None
        slot = self._free.pop()
        _SLOT.pack_into(self._mapped, slot * _SLOT.size, *digest_of(session))
        return slot

    def free(self, slot: int) -> None:
        """Give ``slot`` back."""
        _SLOT.pack_into(self._mapped, slot * _SLOT.size, *_FREE)
        self._free.append(slot)


class UnfinishedStreams:
    """Sessions that are told a stream, which is recorded when it ends, or when somebody asks for what it has told.

    ``sessions`` gets those that a former process left: what their streams had told is gone. So may be the twin of any
    text, and ``texts`` gets a mark.
    """

    def __init__(self, file: SessionFile, sessions: Marks, texts: Marks) -> None:
        self._file = file
        self._sessions = sessions
        self._texts = texts
        for slot, digest in file.left.items():
            if digest != digest_of(_NOBODY):
                sessions.add_digest(digest)
            texts.add(b"")
            file.free(slot)

    def begin(self, session: str | None) -> Callable[[], None]:
        """``session`` is told a stream until the function returned is called; None: nobody's.

        Where there is no room, something of it counts as lost at once.
        """
        slot = self._file.take(session if session is not None else _NOBODY)
        if slot is None:
            if session is not None:
                self._sessions.add(session)
            self._texts.add(b"")
            return lambda: None
        return lambda: self._file.free(slot)


class UnansweredSessions:
    """Sessions that ask, or have asked, without a recorded answer. Nothing of them is lost by that.

    Contains those of former processes, of which nobody knows any more what they had asked. ``lost`` gets sessions for
    which there is no room.
    """

    def __init__(self, file: SessionFile, lost: Marks) -> None:
        self._file = file
        self._lost = lost
        self._former = frozenset(file.left.values())
        self._slots: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    def __contains__(self, session: object) -> bool:
        return isinstance(session, str) and bool(self._former) and digest_of(session) in self._former

    def begin(self, session: str) -> None:
        """A request of ``session`` begins."""
        self._requests[session] = self._requests.get(session, 0) + 1
        if session in self._slots:
            return
        slot = self._file.take(session)
        if slot is None:
            self._lost.add(session)
        else:
            self._slots[session] = slot

    def end(self, session: str, *, is_remembered: bool) -> None:
        """A request of ``session`` ends. ``is_remembered``: this process remembers one that was not answered."""
        self._requests[session] -= 1
        if not self._requests[session]:
            del self._requests[session]
            if not is_remembered:
                self.forget(session)

    def forget(self, session: str) -> None:
        """No unanswered request of ``session`` is remembered; where none runs, its slot is free."""
        if session in self._slots and session not in self._requests:
            self._file.free(self._slots.pop(session))
