"""``redis://``: a server of Redis or Valkey."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
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
)

from router_core.errors import SettingsError
from slime_tiered_store.tiers.remote.client import RemoteError

__all__ = ["RedisClient"]

T = TypeVar("T")

_PREFIX = "slime-store:"


class RedisClient:
    """Objects under the keys ``slime-store:NAME``.

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
        await self._call(self._redis.mset({_PREFIX + name: content for name, content in objects.items()}))

    async def exists(self, name: str) -> bool:
        return bool(await self._call(self._redis.exists(_PREFIX + name)))

    async def list(self, folder: str) -> list[str]:
        async def found() -> list[str]:
            keys = self._redis.scan_iter(match=f"{_PREFIX}{folder}/*", count=10_000)
            return [key.decode().removeprefix(_PREFIX) async for key in keys]

        return list(dict.fromkeys(await self._call(found())))  # a scan may return a key twice

    async def delete(self, names: Sequence[str]) -> None:
        await self._call(self._redis.unlink(*(_PREFIX + name for name in names)))

    async def is_there(self, format_name: str) -> bool:
        return await self.exists(format_name)  # a server that was flushed answers, too

    async def aclose(self) -> None:
        await self._redis.aclose()

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
