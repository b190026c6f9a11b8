"""``redis://``: a server of Redis or Valkey."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar, cast
from urllib.parse import urlsplit

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    WatchError,
)

from router_core.errors import SettingsError
from slime_tiered_store.tiers.remote.client import NOTES_FOLDER, RemoteError

__all__ = ["RedisClient"]

T = TypeVar("T")

_PREFIX = "slime-store:"
#: The key of a set with the names of all notes. Without the set, a SCAN for notes would walk all blocks, too.
_NAMES = f"{_PREFIX}{NOTES_FOLDER}"
#: A member of the set that is no name of a note. While it is missing, the set may lack names of notes. Then the
#: database is scanned, which adds the names and this member.
_COMPLETE = f"{NOTES_FOLDER}/"


class RedisClient:
    """Objects under the keys ``slime-store:NAME``, and a set with the names of the notes.

    Notes are written or deleted in the same transaction in which the set changes. So once the set is complete, it
    always has the names of all notes that exist.

    ``url``: ``redis[s]://[USER:PASSWORD@]HOST[:PORT][/DB]``. Raises SettingsError.
    """

    calls_at_once = 16
    objects_per_put = 64

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        try:
            self._redis = aioredis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                max_connections=self.calls_at_once,
                retry=Retry(NoBackoff(), 0),  # the tier retries
            )
        except ValueError as error:
            raise SettingsError(f"--store-remote {self.url}: {error}") from None

    async def get(self, name: str) -> bytes | None:
        return cast("bytes | None", await self._call(self._redis.get(_PREFIX + name)))

    async def put(self, objects: Mapping[str, bytes]) -> None:
        values = {_PREFIX + name: content for name, content in objects.items()}
        if not (notes := _notes(objects)):
            await self._call(self._redis.mset(values))
            return
        async with self._redis.pipeline(transaction=True) as changes:
            changes.sadd(_NAMES, *notes)
            changes.mset(values)
            await self._call(changes.execute())

    async def exists(self, name: str) -> bool:
        return bool(await self._call(self._redis.exists(_PREFIX + name)))

    async def list(self, folder: str) -> list[str]:
        if folder != NOTES_FOLDER:
            raise ValueError(f"only the names in {NOTES_FOLDER} are kept in a set, got {folder}")
        names = await self._call(self._names())
        if _COMPLETE not in names:
            await self._call(self._complete())
            names = await self._call(self._names())
        return list(names - {_COMPLETE})

    async def delete(self, names: Sequence[str]) -> None:
        keys = [_PREFIX + name for name in names]
        if not (notes := _notes(names)):
            await self._call(self._redis.unlink(*keys))
            return
        async with self._redis.pipeline(transaction=True) as changes:
            changes.unlink(*keys)
            changes.srem(_NAMES, *notes)
            await self._call(changes.execute())

    async def is_there(self, format_name: str) -> bool:
        return await self.exists(format_name)  # a server answers even after its data was flushed

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _names(self) -> set[str]:
        return {name.decode() for name in cast("set[bytes]", await self._redis.smembers(_NAMES))}

    async def _complete(self) -> None:
        """Scan the database for notes that were written before there was a set, and add their names to the set.

        Raises WatchError if a note is deleted meanwhile: the name of a deleted note must not get into the set.
        """
        found = self._redis.scan_iter(match=f"{_NAMES}/*", count=10_000)
        keys = {key async for key in found}  # a scan may return a key twice
        async with self._redis.pipeline(transaction=True) as changes:
            if keys:
                await changes.watch(*keys)
                if await changes.exists(*keys) < len(keys):
                    raise WatchError("a note was deleted while the database was scanned")
                changes.multi()  # type: ignore[no-untyped-call]  # redis does not annotate it
            changes.sadd(_NAMES, _COMPLETE, *(key.decode().removeprefix(_PREFIX) for key in keys))
            await changes.execute()

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except OutOfMemoryError as error:
            raise RemoteError(str(error), retry=False, is_full=True) from None
        except (AuthenticationError, AuthorizationError) as error:
            raise RemoteError(str(error), retry=False) from None
        except ResponseError as error:
            raise RemoteError(str(error), retry=False) from None
        except (RedisError, OSError) as error:
            raise RemoteError(str(error) or type(error).__name__) from None


def _notes(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{NOTES_FOLDER}/")]
