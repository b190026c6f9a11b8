"""``slime-router store verify`` finds the damaged notes that end a start."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.scripted import ScriptedEngine
from router_core.errors import StartupError
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_radix_cache.demotion.notes import RunBegun, unpacked
from slime_radix_cache.demotion.past import Past
from slime_tiered_store.command import main
from slime_tiered_store.note_log import NoteLog, once
from slime_tiered_store.tiers.remote.directory import DirectoryClient
from tiered_store.rollout import JournalledRollout, flags_of, roll

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


class Disk:
    """The SSD directory of routers that run one after the other."""

    def __init__(self, start: Start, tokenizer: EngineTokenizer, checkpoint: str, path: Path) -> None:
        self._start = start
        self._engine = ScriptedEngine(tokenizer)
        self._flags = (*BARE, "--hf-checkpoint", checkpoint, *flags_of("ssd", path))
        self.path = path

    @asynccontextmanager
    async def router(self) -> AsyncIterator[JournalledRollout]:
        """Rollout code of a router with this directory."""
        async with (
            serving(self._engine.app) as url,
            self._start(*self._flags, "--worker-urls", url) as running,
        ):
            yield JournalledRollout(running.client, self._engine)

    @property
    def notes(self) -> list[Path]:
        """The files of notes, in the order of their numbers."""
        found = (self.path / "notes").glob("*-*")
        return sorted(found, key=lambda one: int(one.name.split(".")[1].split("-")[0]))


@pytest.fixture
async def disk(start: Start, tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path) -> Disk:
    """The directory of a router that has stopped. It has several files of notes."""
    disk = Disk(start, tokenizer, checkpoint, tmp_path / "disk")
    async with disk.router() as rollout:
        await roll(rollout)
    return disk


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["verify", str(path)])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["intact"] is (code == 0)
    return code, report


async def refusal(path: Path, begun: RunBegun) -> str:
    """The error about the notes with which a router does not start; empty if it reads them."""
    try:
        log = NoteLog(DirectoryClient(path), once, flag="--store-ssd", is_shared=False)
        Past(await log.read(), begun.tokenizer)
    except StartupError as error:
        return str(error)
    return ""


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: flipped(content, 0),
        lambda content: flipped(content, len(content) // 2),
        lambda content: flipped(content, len(content) - 1),
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: content + b"x",
    ],
    ids=["first byte", "middle", "last byte", "torn", "only the head", "one byte more"],
)
async def test_verify_names_the_note_that_ends_a_start(
    disk: Disk, harm: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    notes = disk.notes
    begun = next(unpacked(notes[0].read_bytes()))
    assert len(notes) > 3
    for note in (notes[0], notes[2], notes[-1]):
        content = note.read_bytes()
        note.write_bytes(harm(content))
        code, report = verified(disk.path, capsys)
        (wrong,) = report["damaged_notes"]
        assert (code, report["notes"], report["damaged"]) == (1, len(notes), [])
        assert (wrong["file"], wrong["reason"]) == (f"notes/{note.name}", "its notes are damaged")
        said = await refusal(disk.path, begun)
        assert f"{disk.path.as_uri()}/{wrong['file']}: it is damaged at byte {wrong['offset']};" in said
        note.write_bytes(content)
    assert verified(disk.path, capsys)[1]["damaged_notes"] == []
    assert not await refusal(disk.path, begun)


async def test_verify_names_missing_and_unreadable_notes(
    disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = disk.notes
    begun = next(unpacked(notes[0].read_bytes()))
    notes[1].unlink()
    notes[2].unlink()
    notes[2].mkdir()
    notes[3].write_bytes(b"")
    code, report = verified(disk.path, capsys)
    assert (code, report["notes"]) == (1, len(notes) - 1)
    assert report["damaged_notes"] == [
        {"file": f"notes/{notes[1].name}", "offset": 0, "reason": "it is missing"},
        {"file": f"notes/{notes[2].name}", "offset": 0, "reason": "it cannot be read: Is a directory"},
        {"file": f"notes/{notes[3].name}", "offset": 0, "reason": "it is empty"},
    ]
    assert f"{notes[1].name} is missing" in await refusal(disk.path, begun)


async def test_torn_last_write_is_no_damage(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of notes gets its name when it is complete, so a kill leaves only the beginning of a ``.tmp`` file."""
    last = disk.notes[-1]
    last.with_name(f"{last.name}.0123456789abcdef.tmp").write_bytes(last.read_bytes()[:-1])
    assert verified(disk.path, capsys)[0] == 0
    async with disk.router() as rollout:
        assert (await rollout.shown("s0"))["complete"]


async def test_damaged_note_ends_the_start(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    note = disk.notes[0]
    note.write_bytes(flipped(note.read_bytes(), 20))
    with pytest.raises(ExceptionGroup) as caught:
        async with disk.router():
            pass
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert f"{note.name}: it is damaged at byte 0" in str(error)
    assert verified(disk.path, capsys)[1]["damaged_notes"][0]["file"] == f"notes/{note.name}"
