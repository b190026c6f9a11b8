"""``file://``: a directory, usually of a file system that several machines mount."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import anyio.to_thread
from anyio import CapacityLimiter

from slime_tiered_store.tiers.remote.client import RemoteError

__all__ = ["DirectoryClient"]

T = TypeVar("T")


class DirectoryClient:
    """A file for each object. ``mode``: mode of new files. A file gets its name when its content is on the device."""

    calls_at_once = 8
    objects_per_put = 16

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.url = path.as_uri()
        self._path = path
        self._mode = mode
        self._limiter = CapacityLimiter(self.calls_at_once)

    async def get(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                return None

        return await self._call(read)

    async def put(self, objects: Mapping[str, bytes]) -> None:
        contents = {self._path / name: content for name, content in objects.items()}
        await self._call(lambda: _write(self._path, contents, self._mode))

    async def exists(self, name: str) -> bool:
        def found() -> bool:
            try:
                (self._path / name).stat()
            except FileNotFoundError:
                return False
            return True

        return await self._call(found)

    async def list(self, folder: str) -> list[str]:
        def found() -> list[str]:
            try:
                paths = list((self._path / folder).iterdir())
            except FileNotFoundError:
                return []
            return [f"{folder}/{path.name}" for path in paths if path.suffix != ".tmp"]

        return await self._call(found)

    async def delete(self, names: Sequence[str]) -> None:
        def unlink() -> None:
            for name in names:
                (self._path / name).unlink(missing_ok=True)

        # If the thread ran on after a cancellation, it could delete objects that are written later.
        await self._call(unlink, abandon=False)

    async def is_there(self, format_name: str) -> bool:
        return await self.exists(format_name)

    async def aclose(self) -> None:
        """Do nothing: no file stays open."""

    async def _call(self, call: Callable[[], T], *, abandon: bool = True) -> T:
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=abandon, limiter=self._limiter)
        except OSError as error:
            is_full = error.errno in (ENOSPC, EDQUOT)
            raise RemoteError(error.strerror or str(error), is_full=is_full, retry=not is_full) from None


def _write(root: Path, contents: Mapping[Path, bytes], mode: int) -> None:
    """Write files, each atomically; all are durable when the call returns. ``root`` must be there."""
    folders = {path.parent for path in contents}
    if missing := [folder for folder in folders if not folder.is_dir()]:
        for folder in missing:
            folder.mkdir(exist_ok=True)
        _sync(root)
    news = {path.with_name(f"{path.name}.{uuid4().hex}.tmp"): path for path in contents}
    try:
        for new, path in news.items():
            with open(new, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(contents[path])
                file.flush()
                os.fdatasync(file.fileno())
        for new, path in news.items():
            new.replace(path)
    except BaseException:
        for new in news:
            with suppress(OSError):
                new.unlink()
        raise
    for folder in folders:
        _sync(folder)  # makes the names of the files durable, too


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
