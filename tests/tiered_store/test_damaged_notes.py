"""Routers that start with a store of which a file of notes is damaged, missing, empty or unreadable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radix_cache.scripted import ScriptedEngine
from router_core.errors import StartupError
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_tiered_store.note_log import NoteLog, once
from slime_tiered_store.tiers.remote.client import RemoteError
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from store_flags import tier_flags
from tiered_store.rollout import JournalledRollout, flags_of, roll

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


def reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, StartupError)
    return str(error)


def notes_of(path: Path) -> list[Path]:
    """The files of notes, in the order of their numbers."""
    return sorted((path / "notes").glob("*-*"), key=lambda one: int(one.name.split(".")[1].split("-")[0]))


def harm(note: Path, how: str) -> str:
    """Damage ``note``; return what a router should say about it."""
    content = note.read_bytes()
    if how == "flipped":
        note.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
        return "it is damaged at byte 0"
    note.unlink()
    return "it is missing"


@pytest.mark.parametrize("home", ["ssd", "file", "both"])
@pytest.mark.parametrize("how", ["flipped", "missing"])
async def test_router_starts_with_the_notes_that_can_be_read(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path, home: str, how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine, path = ScriptedEngine(tokenizer), tmp_path / "store"
    async with serving(engine.app) as url:
        router = (*BARE, "--hf-checkpoint", checkpoint, "--worker-urls", url)
        flags: tuple[str, ...] = (*router, *flags_of("file" if home == "file" else "ssd", path))
        async with start(*flags) as running:
            rollout = JournalledRollout(running.client, engine)
            await roll(rollout)
        if home == "both":
            flags += tier_flags("file", tmp_path / "remote")
        note = notes_of(path)[2]
        said = harm(note, how)
        with pytest.raises(ExceptionGroup) as caught:
            async with start(*flags):
                pass
        message = reason(caught.value)
        assert note.name in message
        assert said.removeprefix("it ") in message
        assert "--store-on-loss mark to start with" in message
        async with start(*flags, "--store-on-loss", "mark") as running:
            assert f"a damaged note is left out: {note.as_uri()}: {said}" in caplog.text
            assert (await running.client.get("/store")).json()["lost"] >= 1
            rollout.http = running.client
            assert not any([await rollout.check(name) for name in rollout.journal])
            shown = [await rollout.shown(name) for name in rollout.journal]
            assert sum(len(one["trajectories"]) for one in shown) >= len(rollout.journal) - 1
            await rollout.turn("new", [78, 79])
            assert await rollout.check("new")
        names = rollout.journal.keys() - {"new"}
        async with start(*flags) as running:  # the damage is mended
            assert (await running.client.get("/store")).json()["lost"] == 0
            rollout.http = running.client
            assert await rollout.check("new")
            assert not any([await rollout.check(name) for name in names])


def log_of(path: Path, *, is_shared: bool = False) -> NoteLog:
    log = NoteLog(DirectoryClient(path), once, flag="--store", is_shared=is_shared)
    log.run = b"\1" * 11
    return log


@pytest.mark.parametrize("how", ["missing", "empty", "unreadable"])
async def test_notes_without_a_content_are_returned_with_the_damage(tmp_path: Path, how: str) -> None:
    first = log_of(tmp_path)
    for number in range(3):
        await first.append(f"note {number}".encode())
    note = notes_of(tmp_path)[1]
    note.unlink()
    if how == "empty":
        note.write_bytes(b"")
    elif how == "unreadable":
        note.mkdir()
    with pytest.raises(StartupError, match="--store-on-loss mark to start without this note"):
        await log_of(tmp_path).read()
    log = log_of(tmp_path)
    found = await log.read(salvages=True)
    said = {"missing": "it is missing", "empty": "it is empty", "unreadable": "it cannot be read: "}[how]
    assert [one.content for one in found] == [b"note 0", b"", b"note 2"]
    assert found[1].damage.startswith(said)
    assert not found[0].damage
    if how == "unreadable":
        with pytest.raises(StartupError, match="a damaged note cannot be replaced"):
            await log.mend({found[1].place: b"mended"})
    else:
        await log.mend({found[1].place: b"mended", "elsewhere": b"x"})
        assert [one.content for one in await log_of(tmp_path).read()] == [b"note 0", b"mended", b"note 2"]


async def test_remote_store_that_does_not_answer_still_ends_the_start(tmp_path: Path) -> None:
    await log_of(tmp_path).append(b"note")

    async def fails(call: object) -> object:
        raise RemoteError("no answer")

    log = NoteLog(DirectoryClient(tmp_path), fails, flag="--store-remote", is_shared=True)
    with pytest.raises(StartupError, match=r"no answer; give another .*without these records$"):
        await log.read(salvages=True)
