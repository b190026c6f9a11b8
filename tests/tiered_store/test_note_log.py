"""A log of notes that is killed at any moment, and read again."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from router_core.errors import StartupError
from slime_tiered_store.errors import TierFailed
from slime_tiered_store.note_log import NoteLog, StoredNote, new_run, once
from slime_tiered_store.note_objects import FOLDER
from slime_tiered_store.tiers.remote.client import RemoteError
from slime_tiered_store.tiers.remote.directory import DirectoryClient

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _few_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_tiered_store.note_log._JOINED", 4)


class Breaking(DirectoryClient):
    """A directory whose calls fail when ``left`` of them have worked."""

    left = 1 << 30

    def _step(self) -> None:
        if not self.left:
            raise RemoteError("broken")
        self.left -= 1

    async def put(self, objects: Mapping[str, bytes]) -> None:
        self._step()
        await super().put(objects)

    async def delete(self, names: Sequence[str]) -> None:
        self._step()
        await super().delete(names)


class SlowList(DirectoryClient):
    """A directory in which something happens between a list and the reads of what it names."""

    def __init__(self, path: Path, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(path)
        self._then = then

    async def list(self, folder: str) -> list[str]:
        names = await super().list(folder)
        await self._then()
        return names


async def opened(path: Path) -> tuple[NoteLog, Breaking, list[bytes]]:
    """Return the log in ``path`` in a new run, its client, and what it has of earlier runs."""
    path.mkdir(exist_ok=True)  # noqa: ASYNC240  # no I/O of others waits
    client = Breaking(path)
    log = NoteLog(client, once, flag="--store-ssd", is_shared=False)
    notes = await log.read()
    log.run = new_run(notes[-1].run if notes else b"")
    return log, client, [note.content for note in notes]


def number(content: int) -> bytes:
    return content.to_bytes(2, "big")


async def test_all_notes_come_back_in_order(tmp_path: Path) -> None:
    written = b""
    for run in range(3):
        log, _, found = await opened(tmp_path)
        assert b"".join(found) == written
        for note in range(10):
            await log.append(number(1000 * run + note))
            written += number(1000 * run + note)
    assert len(list((tmp_path / FOLDER).iterdir())) == 3 * (10 // 4 + 10 % 4)


async def test_notes_are_read_while_their_router_joins_them(tmp_path: Path) -> None:
    writer = NoteLog(DirectoryClient(tmp_path), once, flag="--store-remote", is_shared=True)
    writer.run = new_run(b"")
    written: list[bytes] = []

    async def write() -> None:
        written.append(number(len(written)))
        await writer.append(written[-1])

    for _ in range(3):
        await write()
    reader = NoteLog(SlowList(tmp_path, write), once, flag="--store-remote", is_shared=True)
    found = b"".join(note.content for note in await reader.read())
    assert found == b"".join(written[:3])
    for _ in range(20):
        before = len(written)
        news = b"".join(note.content for note in await reader.news())
        assert written[before - 1] in news
    assert len(list((tmp_path / FOLDER).iterdir())) <= len(written) // 4 + 2 * 4


async def test_large_notes_are_not_joined(tmp_path: Path) -> None:
    log, _, _ = await opened(tmp_path)
    contents = [b"a", b"b", bytes(1 << 20), b"c", bytes(1 << 20)]
    for content in contents:
        await log.append(content)
    _, _, found = await opened(tmp_path)
    assert b"".join(found) == b"".join(contents)
    assert len(found) == 2


@pytest.mark.parametrize("left", range(6))
async def test_log_is_whole_wherever_a_replacement_ends(left: int, tmp_path: Path) -> None:
    log, _, _ = await opened(tmp_path)
    for note in (b"one ", b"two "):
        await log.append(note)
    log, client, _ = await opened(tmp_path)
    client.left = left
    with suppress(StartupError):
        await log.replace([b"both "])
    _, client, found = await opened(tmp_path)
    whole = [b"both "] if left >= 2 else [b"one ", b"two ", b"both "][: 2 + left]
    assert found == whole


async def test_join_that_fails_leaves_the_notes(tmp_path: Path) -> None:
    for left in (3, 4, 5):
        log, client, _ = await opened(tmp_path / str(left))
        client.left = left
        notes = [number(note) for note in range(4)]
        failed = 0
        for note in notes:
            try:
                await log.append(note)
            except TierFailed:
                failed += 1
                client.left = 10
                await log.append(note)
        assert failed == (left == 3)
        _, _, found = await opened(tmp_path / str(left))
        assert b"".join(found) == b"".join(notes)


async def test_missing_note_ends_the_start(tmp_path: Path) -> None:
    log, _, _ = await opened(tmp_path)
    for note in (b"one", b"two", b"three"):
        await log.append(note)
    shutil.move(next((tmp_path / FOLDER).glob("*.2-2")), tmp_path / "away")
    with pytest.raises(StartupError, match=r"\.2-2 is missing; give another directory"):
        await opened(tmp_path)


async def test_later_run_has_the_greater_name() -> None:
    name = new_run(b"")
    for _ in range(3):
        later = new_run(name)
        assert later > name
        name = later
    assert len(name) == 11


def evens(contents: Sequence[bytes]) -> list[bytes]:
    """Shorter notes: the numbers that are even, or the last."""
    last = contents[-1][-2:]
    return [
        b"".join(
            content[at : at + 2]
            for at in range(0, len(content), 2)
            if content[at + 1] % 2 == 0 or content[at : at + 2] == last
        )
        for content in contents
    ]


async def shared_log(path: Path) -> tuple[NoteLog, Breaking, list[StoredNote]]:
    client = Breaking(path)
    log = NoteLog(client, once, flag="--store-remote", is_shared=True)
    notes = await log.read()
    log.run = new_run(notes[-1].run if notes else b"")
    return log, client, notes


def numbers_in(notes: Sequence[StoredNote]) -> list[int]:
    content = b"".join(note.content for note in notes)
    return [int.from_bytes(content[at : at + 2], "big") for at in range(0, len(content), 2)]


@pytest.fixture
async def ended(tmp_path: Path) -> Path:
    """A shared log with a run that has ended: the numbers 0 to 10."""
    log, _, _ = await shared_log(tmp_path)
    for note in range(11):
        await log.append(number(note))
    return tmp_path


SHORT = [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("limit", [8 << 20, 6, 1])
async def test_notes_of_a_run_that_has_ended_become_short(
    limit: int, ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_tiered_store.note_log._SHORTENED_BYTES", limit)
    for _ in range(2):
        log, _, notes = await shared_log(ended)
        assert numbers_in(notes) in (list(range(11)), SHORT)
        await log.shorten(notes, evens)
    log, _, notes = await shared_log(ended)
    assert numbers_in(notes) == SHORT
    assert len(list((ended / FOLDER).iterdir())) == {8 << 20: 1, 6: 3, 1: 5}[limit]


@pytest.mark.parametrize("limit", [8 << 20, 6])
async def test_log_is_whole_wherever_shortening_ends(
    limit: int, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_tiered_store.note_log._SHORTENED_BYTES", limit)
    for left in range(5):
        copy = tmp_path / str(left)
        shutil.copytree(ended / FOLDER, copy / FOLDER)
        log, client, notes = await shared_log(copy)
        client.left = left
        await log.shorten(notes, evens)
        for router in range(2):
            log, _, notes = await shared_log(copy)
            found = numbers_in(notes)
            assert set(SHORT) <= set(found)
            assert sorted(set(found)) == found
            await log.shorten(notes, evens)
            assert not router or found == SHORT


async def test_two_routers_shorten_a_run_in_different_parts(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _, notes), (second, _, same) = await shared_log(ended), await shared_log(ended)
    for log, limit in ((first, 6), (second, 8)):
        monkeypatch.setattr("slime_tiered_store.note_log._SHORTENED_BYTES", limit)
        await log.shorten(notes if log is first else same, evens)
        assert set(numbers_in((await shared_log(ended))[2])) == set(SHORT)


@pytest.mark.parametrize("seen", range(12))
async def test_router_reads_on_in_notes_that_became_short(seen: int, tmp_path: Path) -> None:
    writer, _, _ = await shared_log(tmp_path)
    for note in range(seen):
        await writer.append(number(note))
    reader, _, before = await shared_log(tmp_path)
    for note in range(seen, 11):
        await writer.append(number(note))
    log, _, notes = await shared_log(tmp_path)
    await log.shorten(notes, evens)
    news = numbers_in(await reader.news())
    assert numbers_in(before) == list(range(seen))
    assert {note for note in SHORT if note >= seen} <= set(news)
    assert not await reader.news()


@pytest.mark.parametrize("seen", range(1, 12))
async def test_router_goes_on_with_notes_that_became_short(seen: int, tmp_path: Path) -> None:
    """It joins its notes as it knows them. Some may be repeated then, in order, as after another join."""
    writer, _, _ = await shared_log(tmp_path)
    for note in range(seen):
        await writer.append(number(note))
    log, _, notes = await shared_log(tmp_path)
    await log.shorten(notes, evens)
    for note in range(seen, 11):
        await writer.append(number(note))
    for _ in range(2):
        log, _, notes = await shared_log(tmp_path)
        latest_last = list(dict.fromkeys(reversed(numbers_in(notes))))[::-1]
        assert latest_last == sorted(latest_last)
        assert {*SHORT, seen - 1, *range(seen, 11)} <= {*latest_last}
        await log.shorten(notes, lambda contents: contents)


@pytest.mark.parametrize("reads", ["all", "news"])
async def test_notes_are_read_while_another_router_shortens_them(reads: str, ended: Path) -> None:
    async def shorten() -> None:
        log, _, notes = await shared_log(ended)
        await log.shorten(notes, evens)

    reader = NoteLog(SlowList(ended, shorten), once, flag="--store-remote", is_shared=True)
    assert numbers_in(await (reader.read() if reads == "all" else reader.news())) == SHORT
