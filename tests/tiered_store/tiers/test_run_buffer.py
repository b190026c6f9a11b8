"""Runs of blocks that are read and verified together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_tiered_store.tiers.block_header import HEADER_BYTES, block_header
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.runs import SlotRun, adjacent
from tiered_store.tiers.disks import content_of, key_of

SIZE = 40
LAYOUT = Layout(SIZE, 4)
KEYS = [key_of(number) for number in range(3)]
#: The last one is shorter than the others.
CONTENTS = [content_of(0, SIZE), content_of(1, SIZE), content_of(2, 30)]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of three slots."""
    slots = [block_header(key, content) + content for key, content in zip(KEYS, CONTENTS, strict=True)]
    path = tmp_path / "blocks"
    path.write_bytes(b"".join(slot.ljust(LAYOUT.slot_bytes, b"\0") for slot in slots))
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


def write(fd: int, number: int, place: int, data: bytes) -> None:
    """Overwrite a part of a slot."""
    os.pwrite(fd, data, number * LAYOUT.slot_bytes + place)


def read(fd: int, sizes: list[int]) -> tuple[list[bytes], dict[bytes, str]]:
    """Return the contents of the first slots, up to these sizes, and what is wrong with them."""
    run = SlotRun(0, KEYS[: len(sizes)], [memoryview(bytearray(size)) for size in sizes])
    contents, damaged = LAYOUT.buffer(3).read(FileOps(), fd, run)
    return [bytes(content) for content in contents], damaged


@pytest.mark.parametrize("sizes", [[SIZE, SIZE], [SIZE, SIZE, 30], [0, 7, 30], [SIZE]])
def test_run_is_intact_in_whole_and_in_part(fd: int, sizes: list[int]) -> None:
    wanted = [content[:size] for content, size in zip(CONTENTS, sizes, strict=False)]
    assert read(fd, sizes) == (wanted, {})


@pytest.mark.parametrize("sizes", [[SIZE, SIZE, 30], [SIZE, 7, 0]])
def test_any_changed_byte_is_found_in_its_block(fd: int, sizes: list[int]) -> None:
    for number, content in enumerate(CONTENTS):
        slot = block_header(KEYS[number], content) + content
        for place, byte in enumerate(slot):
            write(fd, number, place, bytes([byte ^ 1 << place % 8]))
            assert list(read(fd, sizes)[1]) == [KEYS[number]], f"byte {place}"
            write(fd, number, place, bytes([byte]))


def test_each_damaged_block_of_a_run_has_its_reason(fd: int) -> None:
    write(fd, 0, 0, bytes(HEADER_BYTES))
    write(fd, 1, 0, block_header(key_of(7), CONTENTS[1]) + CONTENTS[1])
    write(fd, 2, HEADER_BYTES, bytes([CONTENTS[2][0] ^ 1]))
    assert read(fd, [SIZE, SIZE, 30])[1] == {
        KEYS[0]: "it has no header",
        KEYS[1]: f"its header has the key {key_of(7).hex()}",
        KEYS[2]: "its content has a wrong checksum",
    }


def test_block_that_is_too_short_for_its_buffer_is_damaged(fd: int) -> None:
    assert read(fd, [SIZE, SIZE, 31])[1] == {KEYS[2]: "it has 30 bytes instead of 31"}


def test_run_behind_the_end_of_the_file_is_an_error(fd: int) -> None:
    os.ftruncate(fd, 3 * LAYOUT.slot_bytes - 1)
    with pytest.raises(OSError, match="the file ends within the slots 0 to 2"):
        read(fd, [SIZE, SIZE, 30])


def test_runs_end_at_gaps_and_at_1_mib() -> None:
    slots = [5, 6, 7, 9, 3, 4, 4]
    keys = [bytes([place]) * 16 for place in range(len(slots))]
    buffers = [memoryview(key) for key in keys]
    runs = list(adjacent(slots, keys, buffers, 512 << 10))
    assert [run.slot for run in runs] == [5, 7, 9, 3, 4]
    assert [len(run.keys) for run in runs] == [2, 1, 1, 2, 1]
    assert [key for run in runs for key in run.keys] == keys
    assert [buffer for run in runs for buffer in run.buffers] == buffers
    assert not list(adjacent([], [], [], 4096))
