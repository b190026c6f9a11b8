"""A remote tier: blocks by key in a directory, in an S3 bucket or in Redis, shared by several routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from router_core.errors import SettingsError, StartupError
from slime_tiered_store.tiers.remote.client import RemoteClient
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from slime_tiered_store.tiers.remote.tier import TIMEOUT_S, RemoteTier

__all__ = ["RemoteTier", "open_remote_tier"]


async def open_remote_tier(
    url: str, block_bytes: int, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> RemoteTier:
    """Open the store at ``url``. ``options`` are those of :class:`RemoteTier`.

    Raises StartupError if the store does not answer, has blocks of another size, or a package is missing.
    """
    client = _client(url, timeout_s)
    tier = RemoteTier(client, block_bytes, timeout_s=timeout_s, **options)
    try:
        await tier.open()
    except BaseException:
        await client.aclose()
        raise
    return tier


def _client(url: str, timeout_s: float) -> RemoteClient:
    parts = urlsplit(url)
    match parts.scheme:
        case "file":
            path = Path(unquote(parts.path))
            if parts.netloc not in ("", "localhost") or not path.is_absolute():
                raise SettingsError(f"--store-remote: wanted file:///PATH, got {url}")
            if not path.is_dir():
                raise SettingsError(f"--store-remote {url}: there is no such directory; create or mount it")
            return DirectoryClient(path)
        case "s3":
            try:
                from slime_tiered_store.tiers.remote.s3 import S3Client  # it needs obstore
            except ImportError:
                raise _missing(url, "obstore") from None
            return S3Client(url, timeout_s)
        case "redis" | "rediss":
            try:
                from slime_tiered_store.tiers.remote.redis import RedisClient  # it needs redis
            except ImportError:
                raise _missing(url, "redis") from None
            return RedisClient(url, timeout_s)
    raise SettingsError(f"--store-remote: wanted file://, s3://, redis:// or rediss://, got {url}")


def _missing(url: str, package: str) -> StartupError:
    return StartupError(
        f"--store-remote {urlsplit(url).scheme}:// needs {package}: pip install 'slime-router[tiered-store]'"
    )
