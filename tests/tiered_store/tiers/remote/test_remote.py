"""The remote tier over a directory, over Redis and over an S3 server, each a real one."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from deadlines import HANG_S, until
from openai_.chat.chatting import chatting
from openai_.chat.remembered import WORDS, asked, demote_all, is_continued, said, user
from openai_.chat_models.families import QWEN2_5
from router_core.errors import SettingsError, StartupError
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, TierBusy, TierFailed, TierFull
from slime_tiered_store.note_log import NoteLog, new_run
from slime_tiered_store.tier import Block, SharedTier
from slime_tiered_store.tiers.remote import RemoteTier, open_remote_tier
from slime_tiered_store.tiers.remote.client import RemoteClient, RemoteError
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from tiered_store.tiers.disks import BLOCK_BYTES, content_of, key_of
from tiered_store.tiers.remote.remote_servers import redis_server, s3_server

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


@dataclass
class Remote:
    """A store, its URL, and a function that damages an object in it."""

    url: str
    replace: Callable[[str, bytes], Awaitable[None]]

    async def opened(self) -> RemoteTier:
        return await open_remote_tier(self.url, BLOCK_BYTES, timeout_s=HANG_S, attempts=2)


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


@pytest.fixture(scope="module")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture(params=["file", "redis", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    match request.param:
        case "file":
            directory = tmp_path / "remote"
            directory.mkdir()

            async def replace_file(name: str, content: bytes) -> None:
                (directory / name).write_bytes(content)

            return Remote(directory.as_uri(), replace_file)
        case "redis":
            redis = pytest.importorskip("redis.asyncio", reason="redis is not installed: pip install redis")
            url = f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0"

            async def replace_value(name: str, content: bytes) -> None:
                async with redis.Redis.from_url(url) as client:
                    await client.set(f"slime-store:{name}", content)

            return Remote(url, replace_value)
    endpoint = request.getfixturevalue("s3_url")
    from slime_tiered_store.tiers.remote.s3 import S3Client  # it needs obstore

    name = tmp_path.name.replace("_", "-").strip("-").lower()
    bucket(endpoint, "PUT", name)

    async def replace_object(key: str, content: bytes) -> None:
        await S3Client(url, HANG_S).put({key: content})

    url = f"s3://{name}/blocks?endpoint={endpoint}&region=us-east-1"
    return Remote(url, replace_object)


def bucket(url: str, method: str, path: str) -> None:
    httpx.request(method, f"{url}/{path}").raise_for_status()


async def put(tier: RemoteTier, *numbers: int, size: int = BLOCK_BYTES) -> None:
    blocks = [Block(0, key_of(number)) for number in numbers]
    await tier.write(blocks, [memoryview(content_of(number, size)) for number in numbers])


async def got(tier: RemoteTier, *numbers: int, size: int = BLOCK_BYTES) -> list[bytes]:
    into = [bytearray(size) for _ in numbers]
    await tier.read([Block(0, key_of(number)) for number in numbers], [memoryview(each) for each in into])
    return [bytes(each) for each in into]


def name_of(number: int) -> str:
    return f"{key_of(number).hex()[:2]}/{key_of(number).hex()}"


async def test_another_router_reads_what_the_first_wrote(remote: Remote) -> None:
    first: SharedTier = await remote.opened()
    assert isinstance(first, RemoteTier)
    numbers = range(100, 160)
    await put(first, *numbers)
    await put(first, 99, size=37)
    second = await remote.opened()
    assert second.recovered() == {}
    assert await got(second, *numbers) == [content_of(number) for number in numbers]
    assert await got(second, 99, size=10) == [content_of(99, 37)[:10]]
    assert await second.holds([key_of(number) for number in numbers]) == 60
    assert await second.holds([key_of(number) for number in (*range(100, 130), 7, *range(131, 160))]) == 30
    assert await second.holds([key_of(7), key_of(100)]) == 0
    assert await second.holds([]) == 0
    assert (second.counts.read_blocks, second.counts.errors) == (61, 0)
    with pytest.raises(ValueError, match="a block has at most 200 bytes, got 201"):
        await put(first, 5, size=201)
    for tier in (first, second):
        await tier.aclose()


async def test_objects_of_a_folder_are_listed(remote: Remote) -> None:
    tier = await remote.opened()
    await put(tier, 1)
    assert await tier.client.list("notes") == []
    names = [f"notes/{number}" for number in range(12)]
    for name in (*names, "notes2/1"):
        await tier.client.put({name: b"x"})
    assert sorted(await tier.client.list("notes")) == sorted(names)
    await tier.client.delete(names)
    assert await tier.client.list("notes") == []
    await tier.aclose()


async def test_a_block_that_is_not_there_is_missing(remote: Remote) -> None:
    tier = await remote.opened()
    await put(tier, 200)
    with pytest.raises(BlockMissing) as missing:
        await got(tier, 200, 201, 202)
    assert missing.value.key == key_of(201)
    assert tier.counts.errors == 0
    await tier.aclose()


async def test_a_damaged_block_is_refused(remote: Remote) -> None:
    tier = await remote.opened()
    await put(tier, 300, 301, 302)
    with pytest.raises(BlockCorrupt, match="it has 200 bytes instead of 201"):
        await got(tier, 300, size=201)
    header_and_content = 64 + BLOCK_BYTES
    for size in (0, 10, 64, header_and_content - 1):
        await remote.replace(name_of(301), bytes(range(size % 256)).ljust(size, b"\7"))
        with pytest.raises(BlockCorrupt) as corrupt:
            await got(tier, 300, 301, 302)
        assert corrupt.value.key == key_of(301)
    await tier.aclose()


async def test_forgotten_blocks_are_gone_at_once_and_for_all(remote: Remote) -> None:
    tier = await remote.opened()
    await put(tier, *range(400, 410))
    tier.forget([Block(0, key_of(number)) for number in range(400, 405)] + [Block(3, key_of(499))])
    with pytest.raises(BlockMissing):
        await got(tier, 402)
    assert await tier.holds([key_of(402)]) == 0
    await put(tier, 403)  # a later write is not undone
    await tier.aclose()
    other = await remote.opened()
    found = [number for number in range(400, 410) if await other.holds([key_of(number)])]
    assert found == [403, *range(405, 410)]
    await other.aclose()


async def test_tidy_deletes_in_the_background(remote: Remote) -> None:
    tier, other = await remote.opened(), await remote.opened()
    await put(tier, 450, 451)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.tidy)
        for number in (450, 451):
            tier.forget([Block(0, key_of(number))])
            await until(lambda: not tier._forgotten)
            assert await other.holds([key_of(number)]) == 0
        tasks.cancel_scope.cancel()
    await tier.aclose()
    await other.aclose()


async def test_another_size_of_blocks_is_refused(remote: Remote) -> None:
    await (await remote.opened()).aclose()
    with pytest.raises(StartupError, match="it has blocks of 200 bytes, not of 100; give another"):
        await open_remote_tier(remote.url, 100)


async def test_a_cancelled_call_leaves_the_next_one_alone(remote: Remote) -> None:
    tier = await remote.opened()
    await put(tier, *range(500, 524))
    for attempt in range(10):
        with anyio.move_on_after(0.001 * attempt):
            await got(tier, *range(500, 524))
        with anyio.move_on_after(0.001 * attempt):
            await put(tier, *range(524, 544))
        assert await got(tier, 500 + attempt) == [content_of(500 + attempt)]
    assert tier.counts.pending_bytes == 0
    await tier.aclose()


# stores that fail


async def test_redis_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _):
        tier = await open_remote_tier(
            f"redis://:secret@127.0.0.1:{port}".replace(":secret@", ""), BLOCK_BYTES, attempts=2
        )
        await put(tier, 1)
    for call in (tier.holds([key_of(1)]), got(tier, 1), got(tier, 2), put(tier, 3)):
        with pytest.raises(TierFailed):
            await call
    assert tier.counts.errors == 4
    with redis_server(tmp_path, port=port):
        assert await got(tier, 1) == [content_of(1)]  # appendfsync always
        await put(tier, 3)
        assert not tier.counts.is_failing
        tier.forget([Block(0, key_of(1))])
    await tier.aclose()
    with pytest.raises(
        StartupError, match=rf"--store-remote redis://127\.0\.0\.1:{port}: .*connect"
    ) as error:
        await open_remote_tier(f"redis://user:secret@127.0.0.1:{port}", BLOCK_BYTES, attempts=1)
    assert "secret" not in str(error.value)


async def test_a_full_redis_is_full_and_not_failed(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as (port, _):
        tier = await open_remote_tier(f"redis://127.0.0.1:{port}", 1 << 20)
        await put(tier, 0, size=1 << 20)
        with pytest.raises(TierFull):
            await put(tier, *range(1, 12), size=1 << 20)
        assert await got(tier, 0, size=1 << 20) == [content_of(0, 1 << 20)]
        await tier.aclose()


async def test_a_wrong_password_is_told_once_without_the_password(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "right") as (port, _):
        with pytest.raises(StartupError, match="invalid username-password pair") as error:
            await open_remote_tier(f"redis://:wrong@127.0.0.1:{port}", BLOCK_BYTES)
        assert "wrong@" not in str(error.value)
        tier = await open_remote_tier(f"redis://:right@127.0.0.1:{port}/3", BLOCK_BYTES)
        await put(tier, 1)
        await tier.aclose()


async def test_a_directory_that_vanishes_is_a_failure_and_no_miss(tmp_path: Path) -> None:
    directory = tmp_path / "mounted"
    directory.mkdir()
    tier = await open_remote_tier(directory.as_uri(), BLOCK_BYTES, attempts=1)
    await put(tier, 1)
    directory.rename(tmp_path / "elsewhere")
    for call in (got(tier, 1), tier.holds([key_of(1)])):
        with pytest.raises(TierFailed, match="it has no object slime-store-remote-1"):
            await call
    with pytest.raises(TierFailed, match="No such file or directory"):
        await put(tier, 2)
    directory.mkdir()  # an empty mount point
    for call in (got(tier, 1), tier.holds([key_of(1)])):
        with pytest.raises(TierFailed, match="it has no object slime-store-remote-1"):
            await call
    directory.rmdir()
    (tmp_path / "elsewhere").rename(directory)
    assert await got(tier, 1) == [content_of(1)]
    await tier.aclose()


async def test_a_bucket_that_vanishes_is_a_failure_and_no_miss(s3_url: str) -> None:
    from slime_tiered_store.tiers.remote.s3 import S3Client  # it needs obstore

    where = f"s3://vanishing?endpoint={s3_url}&region=us-east-1"
    with pytest.raises(StartupError, match="there is no such bucket"):
        await open_remote_tier(where, BLOCK_BYTES)
    bucket(s3_url, "PUT", "vanishing")
    tier = await open_remote_tier(where, BLOCK_BYTES)
    with pytest.raises(BlockMissing):
        await got(tier, 1)
    await S3Client(where, HANG_S).delete(["slime-store-remote-1"])
    bucket(s3_url, "DELETE", "vanishing")
    for call in (got(tier, 1), tier.holds([key_of(1)])):
        with pytest.raises(TierFailed, match="it has no object slime-store-remote-1"):
            await call
    with pytest.raises(TierFailed, match="there is no such bucket"):
        await put(tier, 1)
    await tier.aclose()


async def test_a_redis_that_was_flushed_is_a_failure_and_no_miss(tmp_path: Path) -> None:
    from redis import Redis  # an optional package

    with redis_server(tmp_path) as (port, _):
        tier = await open_remote_tier(f"redis://127.0.0.1:{port}", BLOCK_BYTES)
        await put(tier, 1)
        with pytest.raises(BlockMissing):
            await got(tier, 2)
        with Redis(port=port) as server:
            server.flushall()
        for call in (got(tier, 1), tier.holds([key_of(1)])):
            with pytest.raises(TierFailed, match="it has no object slime-store-remote-1"):
                await call
        await tier.aclose()


async def test_an_s3_server_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    with s3_server(tmp_path) as url:
        bucket(url, "PUT", "bucket")
        tier = await open_remote_tier(f"s3://bucket?endpoint={url}&region=us-east-1", BLOCK_BYTES, attempts=2)
        await put(tier, 1)
    for call in (tier.holds([key_of(1)]), got(tier, 1), put(tier, 2)):
        with pytest.raises(TierFailed):
            await call
    await tier.aclose()


async def test_environment_may_name_an_endpoint_without_tls(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    bucket(s3_url, "PUT", "from-environment")
    tier = await open_remote_tier("s3://from-environment?region=us-east-1", BLOCK_BYTES, timeout_s=HANG_S)
    await put(tier, 1)
    assert await got(tier, 1) == [content_of(1)]
    await tier.aclose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "wanted file://, s3://, redis:// or rediss://, got"),
        ("gs://bucket", "wanted file://, s3://, redis:// or rediss://, got gs://bucket"),
        ("file://host/path", "wanted file:///PATH, got file://host/path"),
        ("file:///nowhere/at/all", "there is no such directory; create or mount it"),
        ("s3://", r"wanted s3://BUCKET/PREFIX\?endpoint=URL&region=REGION, got s3://"),
        ("s3://bucket?acl=x", r"wanted s3://BUCKET/PREFIX\?endpoint=URL&region=REGION, got"),
        ("redis://127.0.0.1:1/x", "--store-remote redis://127.0.0.1:1/x: "),
    ],
)
async def test_a_mistake_in_the_url_is_told(url: str, message: str) -> None:
    with pytest.raises((SettingsError, StartupError), match=message):
        await open_remote_tier(url, BLOCK_BYTES, attempts=1)


# a client that does as a test says


class ScriptedClient:
    """A client whose calls take the next step: an error is raised, an event is waited for."""

    url = "test://store"
    calls_at_once = 16
    objects_per_put = 1

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.steps: list[RemoteError | anyio.Event] = []
        self.calls: list[str] = []

    async def _step(self, call: str) -> None:
        self.calls.append(call)
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, RemoteError):
            raise step
        if step is not None:
            await step.wait()

    async def get(self, name: str) -> bytes | None:
        await self._step("get")
        return self.objects.get(name)

    async def put(self, objects: Mapping[str, bytes]) -> None:
        await self._step("put")
        self.objects.update(objects)

    async def exists(self, name: str) -> bool:
        await self._step("exists")
        return name in self.objects

    async def list(self, folder: str) -> list[str]:
        return [name for name in self.objects if name.startswith(f"{folder}/")]

    async def delete(self, names: Sequence[str]) -> None:
        await self._step("delete")
        for name in names:
            self.objects.pop(name, None)

    async def is_there(self, format_name: str) -> bool:
        return True

    async def aclose(self) -> None:
        self.calls.append("aclose")


async def scripted(**options: Any) -> tuple[ScriptedClient, RemoteTier]:
    client = ScriptedClient()
    known: RemoteClient = client
    options.setdefault("attempts", 3)
    tier = RemoteTier(known, BLOCK_BYTES, **options)
    await tier.open()
    client.calls.clear()
    return client, tier


async def test_a_call_is_repeated_if_that_may_help() -> None:
    client, tier = await scripted()
    client.steps = [RemoteError("busy"), RemoteError("busy")]
    await put(tier, 1)
    assert client.calls == ["put"] * 3
    client.steps = [RemoteError("busy")] * 3
    with pytest.raises(TierFailed, match="write at test://store failed: busy"):
        await put(tier, 2)
    client.calls.clear()
    client.steps = [RemoteError("no access", retry=False)]
    with pytest.raises(TierFailed, match="no access"):
        await got(tier, 1)
    assert client.calls == ["get"]


async def test_a_call_without_an_answer_ends_in_time() -> None:
    client, tier = await scripted(timeout_s=0.01, attempts=2)
    client.steps = [anyio.Event(), anyio.Event()]
    with pytest.raises(TierFailed, match=r"no answer within 0\.01 s"):
        await tier.holds([key_of(1)])


async def test_what_was_written_in_vain_is_not_deleted() -> None:
    """Another router may have written it."""
    client, tier = await scripted(attempts=1)
    await put(tier, 1)
    client.steps = [RemoteError("busy")]
    with pytest.raises(TierFailed):
        await put(tier, 1)
    tier.forget([Block(0, key_of(1))])
    assert await got(tier, 1) == [content_of(1)]
    tier.forget([Block(0, key_of(1))])
    await tier.aclose()
    assert name_of(1) not in client.objects


async def test_failed_write_of_a_forgotten_block_leaves_it_forgotten(tmp_path: Path) -> None:
    directory = tmp_path / "mounted"
    directory.mkdir()
    tier = await open_remote_tier(directory.as_uri(), BLOCK_BYTES, attempts=1)
    await put(tier, 1)
    tier.forget([Block(0, key_of(1))])
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(TierFailed):
        await put(tier, 1)
    (tmp_path / "elsewhere").rename(directory)
    tier.forget([Block(0, key_of(1))])  # as after each failed write
    assert await tier.holds([key_of(1)]) == 0
    await tier.aclose()
    assert not (directory / name_of(1)).exists()


async def test_cancelled_write_of_a_forgotten_block_leaves_it_forgotten() -> None:
    client, tier = await scripted()
    await put(tier, 1)
    tier.forget([Block(0, key_of(1))])
    client.steps = [anyio.Event()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, tier, 1)
        await until(lambda: client.calls == ["put", "put"])
        tasks.cancel_scope.cancel()
    assert await tier.holds([key_of(1)]) == 0
    await tier.aclose()
    assert name_of(1) not in client.objects


async def test_a_write_waits_for_the_deletion_of_its_key() -> None:
    client, tier = await scripted()
    await put(tier, 1)
    deletes = anyio.Event()
    client.steps = [deletes]
    tier.forget([Block(0, key_of(1))])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.tidy)
        await until(lambda: client.calls[-1] == "delete")
        tasks.start_soon(put, tier, 1)
        await put(tier, 2)
        assert client.calls.count("put") == 2
        deletes.set()
        await until(lambda: client.calls.count("put") == 3)
        tasks.cancel_scope.cancel()
    assert await got(tier, 1) == [content_of(1)]


async def test_a_deletion_that_fails_is_tried_again_at_the_end() -> None:
    client, tier = await scripted(attempts=1)
    await put(tier, 1)
    client.steps = [RemoteError("busy")]
    tier.forget([Block(0, key_of(1))])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.tidy)
        await until(lambda: tier.counts.errors == 1)
        tasks.cancel_scope.cancel()
    assert name_of(1) in client.objects
    with pytest.raises(BlockMissing):
        await got(tier, 1)
    await tier.aclose()
    assert name_of(1) not in client.objects
    assert client.calls[-1] == "aclose"


async def test_writes_wait_for_a_slow_store_and_are_refused_in_the_end() -> None:
    client, tier = await scripted(pending_bytes=BLOCK_BYTES, wait_s=0.05)
    answers = anyio.Event()
    client.steps = [answers]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, tier, 1)
        await until(lambda: client.calls == ["put"])
        with pytest.raises(TierBusy, match="no room for 200 bytes within"):
            await put(tier, 2)
        answers.set()
    assert (tier.counts.waits, tier.counts.refused, tier.counts.pending_bytes) == (1, 1, 0)


async def test_calls_at_once_are_limited() -> None:
    client, tier = await scripted()
    answers = anyio.Event()
    client.steps = [answers] * 100
    async with anyio.create_task_group() as tasks:
        for first in (0, 50):
            tasks.start_soon(put, tier, *range(first, first + 50))
        await until(lambda: len(client.calls) == client.calls_at_once)
        await anyio.sleep(0.01)
        assert len(client.calls) == client.calls_at_once
        answers.set()
    assert len(client.calls) == 100


async def test_one_put_writes_several_small_blocks() -> None:
    client, tier = await scripted()
    client.objects_per_put = 4
    await put(tier, *range(10))
    assert client.calls == ["put"] * 3
    assert await got(tier, *range(10)) == [content_of(number) for number in range(10)]
    large = RemoteTier(client, 1 << 19)
    client.calls.clear()
    await put(large, *range(10, 14), size=1 << 19)
    assert client.calls == ["put"] * 2, "1 MiB each"


async def test_no_block_counts_as_written_when_one_of_several_puts_fails() -> None:
    client, tier = await scripted(attempts=1)
    client.objects_per_put = 4
    client.steps = [anyio.Event(), RemoteError("busy")]
    client.steps[0].set()  # type: ignore[union-attr]  # the event
    with pytest.raises(TierFailed, match="busy"):
        await put(tier, *range(8))
    assert tier.counts.written_blocks == 0
    tier.forget([Block(0, key_of(number)) for number in range(8)])
    await tier.aclose()
    assert name_of(0) in client.objects, "another router may have written it"


async def test_failed_put_of_several_files_leaves_none_of_its_own(tmp_path: Path) -> None:
    client = DirectoryClient(tmp_path)
    (tmp_path / "aa").mkdir()
    with pytest.raises(RemoteError, match="File name too long"):
        await client.put({"aa/1": b"1", "aa/2": b"2", "aa/" + "x" * 255: b"3"})
    assert os.listdir(tmp_path / "aa") == []
    await client.put({"aa/1": b"1", "ab/2": b"2"})
    assert await client.get("ab/2") == b"2"


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, scheme in [("obstore", "s3"), ("redis", "redis")]:
        monkeypatch.setitem(__import__("sys").modules, package, None)
        monkeypatch.delitem(
            __import__("sys").modules, f"slime_tiered_store.tiers.remote.{scheme}", raising=False
        )
        with pytest.raises(
            StartupError, match=rf"{scheme}:// needs {package}: pip install 'slime-router\[tiered-store\]'"
        ):
            await open_remote_tier(f"{scheme}://bucket", BLOCK_BYTES)


async def test_notes_become_short_while_another_router_reads_them(remote: Remote) -> None:
    first, second = await remote.opened(), await remote.opened()
    logs = [
        NoteLog(each.client, each.call, flag="--store-remote", is_shared=True) for each in (first, second)
    ]
    earlier = await logs[0].read()
    logs[0].run = new_run(earlier[-1].run if earlier else b"")
    await logs[0].append(b"0")
    reader = NoteLog(second.client, second.call, flag="--store-remote", is_shared=True)
    assert (await reader.read())[-1].content == b"0"
    for number in range(1, 5):
        await logs[0].append(b"%d" % number)
    notes = [note for note in await logs[1].read() if note.run == logs[0].run]
    assert [note.content for note in notes] == [b"0", b"1", b"2", b"3", b"4"]
    await logs[1].shorten(notes, lambda contents: [*contents[:2], b"", b"", *contents[4:]])
    assert [note.content for note in await reader.news()] == [b"014"]
    names = await second.client.list("notes")
    assert [name for name in names if logs[0].run.hex() in name] == [f"notes/{logs[0].run.hex()}.1-5"]
    await second.client.delete(names)
    for tier in (first, second):
        await tier.aclose()


@pytest.mark.parametrize("remote", ["redis", "s3"], indirect=True)
async def test_chats_go_on_from_what_a_server_keeps(remote: Remote, start: Start) -> None:
    """At a second router, which finds what a kill of the first would leave, and after a stop of both."""
    url = re.sub("/0$", "/1", remote.url)  # the first database has the smaller blocks of other tests
    flags = ("--plugin", "tiered_store", "--store-memory-bytes", "40960", "--store-remote", url)
    life = partial(chatting, start, WORDS, family=QWEN2_5, flags=flags)
    async with life() as one, life() as two:
        first = await asked(one, user("a"))
        await asked(one, user("twice?"), session="again")
        await demote_all(one)
        twice = await asked(one, user("twice?"), session="again")
        second = await asked(two, user("a"), said(first), user("b"))
        assert (second["history"], is_continued(second, first)) == ("exact", True)
        other = await asked(two, user("twice?"), said(twice), user("b"), session="again")
        assert other["history"] == "fresh", "its tokens are in memory of the first router"
    async with life() as three:
        third = await asked(three, user("a"), said(first), user("b"), said(second), user("c"))
        assert (third["history"], is_continued(third, second)) == ("exact", True)
        known = await asked(three, user("twice?"), said(twice), user("c"), session="again")
        assert (known["history"], is_continued(known, twice)) == ("exact", True)


async def test_calls_leave_no_reference_cycles(remote: Remote) -> None:
    """A server's garbage collector hardly ever frees cycles of objects that lived as long as a call."""
    tier = await remote.opened()
    await put(tier, 0)
    await got(tier, 0)
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            await put(tier, number)
            await got(tier, number)
            assert await tier.holds([key_of(number)]) == 1
        assert gc.collect() < 200  # of 60 calls; the tests before may leave some
    finally:
        gc.enable()
        await tier.aclose()
