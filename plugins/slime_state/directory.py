"""The state directory of one router."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from router_core.errors import StartupError
from slime_state.snapshot import Foreign, Snapshot

__all__ = ["StateDirectory"]


class StateDirectory:
    """The directory ``path``, locked by this process. Raises StartupError when it cannot be locked or made.

    Only the owner may read the file in it, which has the workers' API keys.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / "workers.json"
        self._new = path / "workers.json.tmp"
        self._content = b""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "state.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"--state-dir: wanted a directory, got {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            told = f"another router keeps its state in {path}; stop it, or give another --state-dir"
            raise StartupError(f"--state-dir: {told}") from None

    def read(self) -> Snapshot:
        """Return the saved snapshot, or an empty one for a new directory. Raises StartupError."""
        try:
            self._content = self._file.read_bytes()
            return Snapshot.from_json(self._content)
        except FileNotFoundError:
            return Snapshot()
        except (OSError, Foreign) as error:
            raise StartupError(
                f"--state-dir: {self._file} cannot be read ({error}); move it away to start without its workers"
            ) from None

    def write(self, snapshot: Snapshot) -> None:
        """Replace the saved snapshot by ``snapshot``, atomically. Raises OSError."""
        content = snapshot.to_json()
        if content == self._content:
            return
        with open(self._new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())  # else the renamed file could be empty after a power cut
        self._new.replace(self._file)
        self._content = content

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
