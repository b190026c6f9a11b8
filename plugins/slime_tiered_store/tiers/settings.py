"""The flags of the tiers, and a function that opens the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from router_core.errors import SettingsError
from router_core.flags import flag
from slime_tiered_store.errors import NotEnoughSpaceError
from slime_tiered_store.note_log import NoteLog, once
from slime_tiered_store.note_objects import FOLDER
from slime_tiered_store.tiers.block_header import HEADER_BYTES
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.remote import open_remote_tier
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from slime_tiered_store.tiers.remote.tier import RemoteTier
from slime_tiered_store.tiers.ssd.tier import SsdTier

__all__ = ["TierSettings", "Tiers", "open_tiers"]

#: If ``--store-remote-bytes`` is not set, the remote tier has at least this many bytes.
_REMOTE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The flags of the tiers. All sizes are in bytes."""

    memory_bytes: int = flag(
        "--store-memory-bytes",
        default=1 << 30,
        at_least=1,
        metavar="BYTES",
        help="size of the store's memory tier",
    )
    ssd: str = flag(
        "--store-ssd",
        default="",
        metavar="DIR[,DIR]",
        help="directories of the store's SSD tier, one for each disk, separated by commas",
    )
    ssd_bytes: int = flag(
        "--store-ssd-bytes",
        default=0,
        at_least=0,
        metavar="BYTES",
        help="size of the SSD tier, over all its directories; it is allocated at the start",
    )
    remote: str = flag(
        "--store-remote",
        default="",
        metavar="URL",
        help="a store that routers share: file:///DIR, s3://BUCKET/PREFIX or redis://HOST:PORT/DB",
    )
    remote_bytes: int | None = flag(
        "--store-remote-bytes",
        type=int,
        at_least=1,
        metavar="BYTES",
        help="size of the remote tier, for the records of this router and the known records of other routers; "
        "more than the SSD tier has (default: 64 GiB, or room for twice the blocks of the SSD tier if that is more)",
    )
    remote_timeout_s: float = flag(
        "--store-remote-timeout-secs",
        default=10.0,
        above=0,
        metavar="SECONDS",
        help="longest time for one attempt of a call to the remote store; a call has up to four attempts",
    )
    wait_s: float = flag(
        "--store-wait-secs",
        default=30.0,
        at_least=0,
        metavar="SECONDS",
        help="longest time that a write waits for a slow SSD or remote store, and a read for an answer of an SSD",
    )

    def __post_init__(self) -> None:
        if bool(self.ssd) != bool(self.ssd_bytes):
            raise SettingsError("--store-ssd and --store-ssd-bytes: wanted both or none")
        if self.ssd and not all(self.ssd.split(",")):
            raise SettingsError(f"--store-ssd: wanted DIR[,DIR], got {self.ssd!r}")

    @property
    def directories(self) -> list[Path]:
        """The directories of the SSD tier; [] if there is no SSD tier."""
        return [Path(path) for path in self.ssd.split(",")] if self.ssd else []


@dataclass(frozen=True, slots=True)
class Tiers:
    """Open tiers, and the ``logs`` of the SSD and remote tiers, by tier name. Run ``remote.tidy`` in the background."""

    memory: MemoryArena
    ssd: SsdTier | None
    remote: RemoteTier | None
    logs: Mapping[str, NoteLog]

    async def aclose(self) -> None:
        """Close all tiers."""
        try:
            if self.remote is not None:
                await self.remote.aclose()
        finally:
            try:
                if self.ssd is not None:
                    await self.ssd.aclose()
            finally:
                await self.memory.aclose()


def _blocks_in(flag: str, size: int, block_bytes: int) -> int:
    """Return the number of blocks that fit into ``size`` bytes. Raises SettingsError if no block fits."""
    if size < block_bytes:
        raise SettingsError(f"{flag}: wanted at least {block_bytes} bytes, the size of a block, got {size}")
    return size // block_bytes


def _remote_blocks(settings: TierSettings, block_bytes: int, ssd_blocks: int) -> int:
    """Return the number of blocks of the remote tier. Raises SettingsError if the SSD tier has as many or more.

    Then the remote tier could not keep all records, and other routers find only the records in it.
    """
    size = HEADER_BYTES + block_bytes
    if settings.remote_bytes is None:
        return max(_REMOTE_BYTES // size, 2 * ssd_blocks)
    blocks = _blocks_in("--store-remote-bytes", settings.remote_bytes, size)
    if blocks <= ssd_blocks:
        raise SettingsError(
            f"--store-remote-bytes {settings.remote_bytes}: wanted at least {(ssd_blocks + 1) * size} bytes, for more "
            "blocks than the SSD tier has, since the remote store keeps all records, and the SSD those used last; "
            "raise --store-remote-bytes, or lower --store-ssd-bytes (files of an earlier start never get smaller: "
            "give --store-ssd a new directory)"
        )
    return blocks


async def open_tiers(settings: TierSettings, block_bytes: int) -> Tiers:
    """Open the tiers for blocks of ``block_bytes`` bytes, all or none. Raises StartupError."""
    capacity = _blocks_in("--store-memory-bytes", settings.memory_bytes, block_bytes)
    try:
        memory = MemoryArena(capacity, block_bytes)
    except NotEnoughSpaceError:
        raise SettingsError(
            f"--store-memory-bytes: the system does not give {settings.memory_bytes} bytes"
        ) from None
    ssd: SsdTier | None = None
    remote: RemoteTier | None = None
    try:
        directories = settings.directories
        remote_blocks = partial(_remote_blocks, settings, block_bytes)
        if directories:
            ssd = await SsdTier.open(
                directories,
                settings.ssd_bytes,
                block_bytes,
                check_capacity=remote_blocks if settings.remote else None,
                wait_s=settings.wait_s,
            )
        if settings.remote:
            remote = await open_remote_tier(
                settings.remote,
                block_bytes,
                capacity=remote_blocks(ssd.capacity if ssd is not None else 0),
                timeout_s=settings.remote_timeout_s,
                wait_s=settings.wait_s,
            )
    except BaseException:
        await Tiers(memory, ssd, None, {}).aclose()
        raise
    logs: dict[str, NoteLog] = {}
    if ssd is not None:
        # The log is in only one of the directories: in the one that was the first when the log began.
        path = next((one for one in directories if (one / FOLDER).is_dir()), directories[0])
        logs[ssd.name] = NoteLog(
            DirectoryClient(path.absolute(), mode=0o600), once, flag="--store-ssd", is_shared=False
        )
    if remote is not None:
        logs[remote.name] = NoteLog(remote.client, remote.call, flag="--store-remote", is_shared=True)
    return Tiers(memory, ssd, remote, logs)
