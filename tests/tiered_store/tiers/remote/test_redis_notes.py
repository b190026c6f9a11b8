"""The set of the names of notes in a real Redis: it is read in place of a scan, and always has all notes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from deadlines import HANG_S
from slime_tiered_store.tiers.remote import RemoteTier, open_remote_tier
from slime_tiered_store.tiers.remote.client import RemoteError
from tiered_store.tiers.disks import BLOCK_BYTES
from tiered_store.tiers.remote.remote_servers import redis_server

if TYPE_CHECKING:
    from redis.asyncio import Redis

pytestmark = pytest.mark.anyio

_NOTES = [f"notes/{number}" for number in range(5)]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


@pytest.fixture
async def server(port: int) -> AsyncIterator[Redis]:
    """A client of the server, which is empty."""
    from redis.asyncio import Redis  # an optional package

    async with Redis(port=port) as server:
        await server.flushall()
        yield server


async def opened(port: int, attempts: int = 3) -> RemoteTier:
    return await open_remote_tier(
        f"redis://127.0.0.1:{port}", BLOCK_BYTES, timeout_s=HANG_S, attempts=attempts
    )


async def listed(tier: RemoteTier) -> list[str]:
    return sorted(await tier.call(lambda: tier.client.list("notes")))


async def existing(server: Redis) -> list[str]:
    keys = cast("list[bytes]", await server.keys("slime-store:notes/*"))
    return sorted(key.decode().removeprefix("slime-store:") for key in keys)


async def counts(server: Redis) -> dict[str, int]:
    stats = await server.info("commandstats")
    return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}


@asynccontextmanager
async def relay(port: int, forwarded: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[int]:
    """A port whose connections lead to ``port``. A connection ends when ``forwarded`` shortens what a client sends."""

    async def serve(client: SocketStream) -> None:
        async with client, await anyio.connect_tcp("127.0.0.1", port) as upstream:

            async def back() -> None:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async for data in upstream:
                        await client.send(data)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(back)
                with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                    while True:
                        sent = await client.receive()
                        kept = await forwarded(sent)
                        await upstream.send(kept)
                        if len(kept) < len(sent):
                            break
                tasks.cancel_scope.cancel()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


async def test_calls_of_list_do_not_depend_on_blocks(port: int, server: Redis) -> None:
    first = await opened(port)
    assert await listed(first) == []
    calls = []
    for num_blocks in (0, 20_000):
        if num_blocks:
            await server.mset(
                {f"slime-store:{number % 256:02x}/{number:x}": b"x" for number in range(num_blocks)}
            )
        await server.config_resetstat()
        for name in _NOTES:
            await first.client.put({name: b"x"})
        second = await opened(port)
        for _ in range(3):
            assert await listed(first) == await listed(second) == _NOTES
        await first.client.delete(_NOTES)
        assert await listed(second) == []
        await second.aclose()
        calls.append(
            {name: count for name, count in (await counts(server)).items() if not name.startswith("info")}
        )
    await first.aclose()
    assert calls[0] == calls[1]
    assert not {"scan", "keys"} & calls[0].keys()
    assert calls[0]["smembers"] == 7


async def test_blocks_are_not_in_the_set(port: int, server: Redis) -> None:
    tier = await opened(port)
    await tier.client.put({"ab/abcd": b"x", "notes2/1": b"x", "notes/1": b"x"})
    assert await listed(tier) == ["notes/1"]
    await tier.client.delete(["ab/abcd", "notes2/1"])
    assert await server.smembers("slime-store:notes") == {b"notes/", b"notes/1"}
    with pytest.raises(ValueError, match="only the names in notes are kept in a set, got ab"):
        await tier.client.list("ab")
    await tier.aclose()


async def test_notes_of_an_earlier_build_are_found_once(port: int, server: Redis) -> None:
    await server.mset({f"slime-store:{name}": b"x" for name in (*_NOTES, "ab/abcd")})
    first, second = await opened(port), await opened(port)
    await first.client.put({"notes/9": b"x"})  # makes a set that lacks the earlier notes
    assert await listed(first) == [*_NOTES, "notes/9"]
    scans = (await counts(server))["scan"]
    assert await listed(second) == [*_NOTES, "notes/9"]
    await second.client.delete(["notes/9", *_NOTES])
    assert await listed(first) == []
    assert (await counts(server))["scan"] == scans
    for tier in (first, second):
        await tier.aclose()


@pytest.mark.parametrize("before", [b"WATCH", b"EXISTS", b"MULTI"])
async def test_a_note_deleted_during_the_scan_is_not_listed(port: int, server: Redis, before: bytes) -> None:
    await server.mset({f"slime-store:{name}": b"x" for name in _NOTES})
    other = await opened(port)

    async def forwarded(sent: bytes) -> bytes:
        if before in sent:
            await other.client.delete(_NOTES[:1])
        return sent

    async with relay(port, forwarded) as relayed:
        tier = await opened(relayed)
        assert await listed(tier) == _NOTES[1:] == await existing(server)
        await tier.aclose()
    await other.aclose()


async def test_list_has_what_exists_wherever_a_change_is_cut(port: int, server: Redis) -> None:
    """A router that ends while it writes or deletes notes has sent a part of its request."""
    plain = await opened(port)
    await listed(plain)
    left = 0

    async def forwarded(sent: bytes) -> bytes:
        return sent[:left] if b"MULTI" in sent else sent

    outcomes = set()
    async with relay(port, forwarded) as relayed:
        tier = await opened(relayed, attempts=1)
        for left in range(0, 400, 4):  # noqa: B007  # forwarded() uses it
            await plain.client.put({"notes/old": b"x"})
            for change in (tier.client.put({"notes/new": b"x"}), tier.client.delete(["notes/old"])):
                with suppress(RemoteError):
                    await change
                names = await existing(server)
                assert await listed(plain) == names
                outcomes.add(tuple(names))
            await plain.client.delete(["notes/new", "notes/old"])
        await tier.aclose()
    await plain.aclose()
    assert {("notes/old",), ("notes/new",)} <= outcomes  # all cut, none cut


async def test_cancelled_changes_of_notes_leave_the_next_call_alone(port: int, server: Redis) -> None:
    tier = await opened(port)
    for attempt in range(20):
        with anyio.move_on_after(0.0003 * attempt):
            await tier.client.put(dict.fromkeys(_NOTES, b"x"))
            await tier.client.delete(_NOTES[:3])
        assert await listed(tier) == await existing(server)
    await tier.aclose()


async def test_a_note_does_not_fit_into_a_full_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as (port, _):
        tier = await opened(port)
        notes = {f"notes/{number}": bytes(1 << 20) for number in range(12)}

        async def write() -> None:
            for name, content in notes.items():
                await tier.client.put({name: content})

        with pytest.raises(RemoteError) as error:
            await write()
        assert error.value.is_full
        names = await listed(tier)
        assert 0 < len(names) < 12
        await tier.client.delete(names)
        assert await listed(tier) == []
        await tier.aclose()
