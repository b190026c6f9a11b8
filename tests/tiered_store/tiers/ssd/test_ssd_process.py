"""SIGKILL to a process that writes blocks, and ``slime-router store verify``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import anyio
import pytest

from slime_tiered_store.command import main
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import BLOCK_BYTES, is_intact, key_of, put
from tiered_store.tiers.ssd.endless_writer import SIZE, SLOTS

pytestmark = pytest.mark.anyio
KILLS = 3


def script(name: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a script beside this file."""
    tests = Path(__file__).parents[3]
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}


def killed(path: Path, first: int, after: int) -> list[tuple[str, int, int]]:
    """Run the writer until it has printed ``after`` lines, and kill it. Return all it printed."""
    command, environment = script("endless_writer.py", path, first)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        process.kill()
        lines += process.stdout.read().splitlines()
    words = [line.split() for line in lines]
    return [(word, int(number), int(block_id)) for word, number, block_id in words]


async def test_all_acknowledged_blocks_are_found_after_each_kill(tmp_path: Path) -> None:
    random = Random(5)
    held: dict[int, set[int | None]] = {block_id: {None} for block_id in range(SLOTS)}
    for life in range(KILLS):
        for word, number, block_id in killed(tmp_path, life * 10_000, random.randrange(1, 200)):
            if word == "begin":
                held[block_id] |= {None, number}
            elif word == "done":
                held[block_id] = {number}
        tier = await SsdTier.open([tmp_path], SIZE, BLOCK_BYTES)
        found = {block_id: key for key, block_id in tier.recovered().items()}
        for block_id, possible in held.items():
            numbers = [
                each
                for each in possible
                if (key_of(each) if each is not None else None) == found.get(block_id)
            ]
            assert len(numbers) == 1
            if numbers[0] is not None:
                assert await is_intact(tier, numbers[0], block_id)
            held[block_id] = set(numbers)
        await tier.aclose()
        assert main(["verify", str(tmp_path)]) == 0


async def test_forgotten_blocks_stay_gone_after_an_end_without_a_close(tmp_path: Path) -> None:
    command, environment = script("unclosed_writer.py", tmp_path)
    await anyio.run_process(command, env=environment)
    tier = await SsdTier.open([tmp_path], SIZE, BLOCK_BYTES)
    assert tier.recovered() == {}
    await tier.aclose()


def verified(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, object]], str]:
    code = main(["verify", *map(str, paths)])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


async def test_verify_names_each_damaged_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = await SsdTier.open([a, b], 2 * SIZE, BLOCK_BYTES)
    await put(tier, {number: number for number in range(10)})
    assert verified(capsys, a) == (
        2,
        [],
        f"slime-router store: {a} cannot be verified: a router uses it; stop the router first\n",
    )
    await tier.aclose()
    report = {
        "directory": str(a),
        "intact": True,
        "block_bytes": 200,
        "slots": SLOTS,
        "blocks": 5,
        "skipped_records": 0,
        "notes": 0,
        "damaged_notes": [],
    }
    assert verified(capsys, a) == (0, [{**report, "damaged": []}], "")
    before = {path: path.read_bytes() for path in b.iterdir()}
    content = bytearray(before[b / "blocks"])
    content[2 * 4096 + 100] ^= 1
    before[b / "blocks"] = bytes(content)
    (b / "blocks").write_bytes(content)
    code, reports, _ = verified(capsys, a, b)
    assert code == 1
    damaged = [{"slot": 2, "key": key_of(5).hex(), "reason": "its content has a wrong checksum"}]
    assert [each["damaged"] for each in reports] == [[], damaged]
    assert {path: path.read_bytes() for path in b.iterdir()} == before
    os.truncate(b / "blocks", 4096 * 4)
    code, reports, _ = verified(capsys, b)
    assert (code, reports[0]["damaged"]) == (
        1, [*damaged, {"slot": 4, "key": key_of(9).hex(), "reason": "the file ends within the slots 4 to 4"}]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "DIR"),
        (["mend", "DIR"], "mend"),
        (["verify", "/nowhere"], "it has no store.json, so it is no directory of --store-ssd"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


async def test_verify_refuses_a_damaged_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = await SsdTier.open([tmp_path], SIZE, BLOCK_BYTES)
    await tier.aclose()
    for name in ("index.0", "index.1"):
        (tmp_path / name).write_bytes(bytes(64))
    code, reports, told = verified(capsys, tmp_path)
    assert (code, reports) == (2, [])
    assert told == f"slime-router store: {tmp_path} cannot be verified: the index is damaged\n"
