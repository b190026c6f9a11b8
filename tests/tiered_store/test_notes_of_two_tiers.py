"""Notes about records in the logs of two tiers, of which each run writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_radix_cache.demotion.notes import FORMAT, Demoted, Dropped, Ended, RunBegun, packed
from slime_radix_cache.demotion.past import Past
from slime_tiered_store.note_log import NoteLog, new_run, once
from slime_tiered_store.tiers.remote.directory import DirectoryClient

pytestmark = pytest.mark.anyio

KEY = b"k" * 16
DEMOTED = Demoted(KEY, b"", 1, "s", (0, 0, 0), None, 0, (), None, None, None, False, False, b"")


async def run_of_router(path: Path, home: str, *notes: Any) -> int:
    """Start with the log ``home``, write ``notes``, and stop. Return the number of segments that were found."""
    logs = {}
    for name in ("remote", "ssd"):
        (path / name).mkdir(exist_ok=True)
        logs[name] = NoteLog(DirectoryClient(path / name), once, flag=name, is_shared=name == "remote")
    found = sorted([note for log in logs.values() for note in await log.read()], key=lambda note: note.run)
    log = logs[home]
    log.run = new_run(found[-1].run if found else b"")
    past = Past(found, "tokenizer", is_shared=log.is_shared)
    if not log.is_shared:
        await log.replace(past.as_notes())
    await log.append(packed([RunBegun(FORMAT, "tokenizer")]))
    await log.append(packed([*notes, Ended()]))
    return len(past.segments)


@pytest.mark.parametrize(("first", "second"), [("remote", "ssd"), ("ssd", "remote"), ("ssd", "ssd")])
async def test_dropped_record_stays_dropped_when_the_home_moves(
    first: str, second: str, tmp_path: Path
) -> None:
    assert await run_of_router(tmp_path, first, DEMOTED) == 0
    assert await run_of_router(tmp_path, second, Dropped(KEY)) == 1
    for home in (second, second, first, second, second, first):
        assert await run_of_router(tmp_path, home) == 0


async def test_notes_of_a_dropped_record_go_with_the_second_start(tmp_path: Path) -> None:
    await run_of_router(tmp_path, "ssd", DEMOTED)
    await run_of_router(tmp_path, "ssd", Dropped(KEY))
    for _ in range(2):
        await run_of_router(tmp_path, "ssd")
    files = (tmp_path / "ssd" / "notes").iterdir()
    assert not any(KEY in file.read_bytes() for file in files)
