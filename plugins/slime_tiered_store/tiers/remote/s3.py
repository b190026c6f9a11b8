"""``s3://``: a bucket of Amazon S3, or of a server with its protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from router_core.errors import SettingsError
from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.remote.client import RemoteError

if TYPE_CHECKING:
    from obstore.store import S3Config

__all__ = ["S3Client"]

T = TypeVar("T")


class S3Client:
    """Objects of a bucket.

    ``url``: ``s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=REGION``. Credentials, and what the URL leaves out,
    come from the environment variables of AWS's tools. Raises SettingsError.
    """

    calls_at_once = 64  # a call takes some 10 ms, however small the object
    objects_per_put = 1

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not parts.netloc or query.keys() - {"endpoint", "region"}:
            raise SettingsError(
                f"--store-remote: wanted s3://BUCKET/PREFIX?endpoint=URL&region=REGION, got {url}"
            )
        config: S3Config = {}
        if "region" in query:
            config["region"] = query["region"]
        if "endpoint" in query:
            config["endpoint"] = query["endpoint"]
        self.url = url
        try:
            self._store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                config=config,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    "connect_timeout": timedelta(seconds=timeout_s),
                    "allow_http": True,  # if the endpoint, of the URL or of the environment, has no TLS
                },
                retry_config={"max_retries": 0},  # the tier retries
            )
        except BaseError as error:
            raise SettingsError(f"--store-remote {url}: {error}") from None

    async def get(self, name: str) -> Buffer | None:
        try:
            result = await self._call(obstore.get_async(self._store, name))
            return memoryview(await self._call(result.bytes_async()))
        except FileNotFoundError:
            return None

    async def put(self, objects: Mapping[str, bytes]) -> None:
        try:
            for name, content in objects.items():
                await self._call(obstore.put_async(self._store, name, content))
        except FileNotFoundError:
            raise RemoteError("there is no such bucket", retry=False) from None

    async def exists(self, name: str) -> bool:
        try:
            await self._call(obstore.head_async(self._store, name))
        except FileNotFoundError:
            return False
        return True

    async def list(self, folder: str) -> list[str]:
        async def found() -> list[str]:
            pages = obstore.list(self._store, folder)
            return [entry["path"] async for page in pages for entry in page]

        return await self._call(found())

    async def delete(self, names: Sequence[str]) -> None:
        try:
            await self._call(obstore.delete_async(self._store, list(names)))
        except FileNotFoundError:
            raise RemoteError("there is no such bucket", retry=False) from None

    async def is_there(self, format_name: str) -> bool:
        return await self.exists(format_name)

    async def aclose(self) -> None:
        """obstore closes the connections when nothing refers to the store any more."""

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except FileNotFoundError:
            raise
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise RemoteError(_told(error), retry=False) from None
        except (BaseError, OSError) as error:
            raise RemoteError(_told(error)) from None


def _told(error: Exception) -> str:
    """Return the first line of an error. The other lines of obstore's errors are about its internals."""
    return str(error).strip().partition("\n")[0]
