"""Runs of blocks that are written together, and read and verified together."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_tiered_store.tiers.block_header import HEADER_BYTES, block_header
from slime_tiered_store.tiers.ssd.block_file import BlockFile
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffers
from slime_tiered_store.tiers.ssd.runs import SlotRun, adjacent
from tiered_store.tiers.disks import content_of, key_of, write_any

SIZE = 40
LAYOUT = Layout(SIZE, 4)
KEYS = [key_of(number) for number in range(3)]
#: The last one is shorter than the others.
CONTENTS = [content_of(0, SIZE), content_of(1, SIZE), content_of(2, 30)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three slots."""
    slots = [block_header(key, content) + content for key, content in zip(KEYS, CONTENTS, strict=True)]
    path = tmp_path / "blocks"
    path.write_bytes(b"".join(slot.ljust(LAYOUT.slot_bytes, b"\0") for slot in slots))
    return path


def write(path: Path, number: int, place: int, data: bytes) -> None:
    """Overwrite a part of a slot."""
    with path.open("r+b", buffering=0) as blocks:
        write_any(blocks.fileno(), data, number * LAYOUT.slot_bytes + place)


def read(path: Path, sizes: list[int]) -> tuple[list[bytes], dict[bytes, str]]:
    """Return the contents of the first slots, up to these sizes, and what is wrong with them."""
    file = BlockFile(path, FileOps(), writable=False)
    run = SlotRun(0, KEYS[: len(sizes)], [memoryview(bytearray(size)) for size in sizes])
    buffer = LAYOUT.buffer(3)
    results = []
    for direct in (False, True):
        contents, damaged = buffer.read(file, run, direct=direct)
        results.append(([bytes(content) for content in contents], damaged))
    file.close()
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("sizes", [[SIZE, SIZE], [SIZE, SIZE, 30], [0, 7, 30], [SIZE]])
def test_run_is_intact_in_whole_and_in_part(path: Path, sizes: list[int]) -> None:
    wanted = [content[:size] for content, size in zip(CONTENTS, sizes, strict=False)]
    assert read(path, sizes) == (wanted, {})


@pytest.mark.parametrize("sizes", [[SIZE, SIZE, 30], [SIZE, 7, 0]])
def test_any_changed_byte_is_found_in_its_block(path: Path, sizes: list[int]) -> None:
    for number, content in enumerate(CONTENTS):
        slot = block_header(KEYS[number], content) + content
        for place, byte in enumerate(slot):
            write(path, number, place, bytes([byte ^ 1 << place % 8]))
            assert list(read(path, sizes)[1]) == [KEYS[number]], f"byte {place}"
            write(path, number, place, bytes([byte]))


def test_each_damaged_block_of_a_run_has_its_reason(path: Path) -> None:
    write(path, 0, 0, bytes(HEADER_BYTES))
    write(path, 1, 0, block_header(key_of(7), CONTENTS[1]) + CONTENTS[1])
    write(path, 2, HEADER_BYTES, bytes([CONTENTS[2][0] ^ 1]))
    assert read(path, [SIZE, SIZE, 30])[1] == {
        KEYS[0]: "it has no header",
        KEYS[1]: f"its header has the key {key_of(7).hex()}",
        KEYS[2]: "its content has a wrong checksum",
    }


def test_block_that_is_too_short_for_its_buffer_is_damaged(path: Path) -> None:
    assert read(path, [SIZE, SIZE, 31])[1] == {KEYS[2]: "it has 30 bytes instead of 31"}


def test_run_behind_the_end_of_the_file_is_an_error(path: Path) -> None:
    os.truncate(path, 3 * LAYOUT.slot_bytes - 1)
    with pytest.raises(OSError, match="the file ends within the slots 0 to 2"):
        read(path, [SIZE, SIZE, 30])


@pytest.mark.parametrize(
    "sizes",
    [[9000] * 5, [9000, 1, 9000, 9000, 0], [4032, 4033, 8128, 8129, 8999], [7], [12224, 8129, 9000]],
)
def test_written_run_has_headers_zeros_and_gaps(tmp_path: Path, sizes: list[int]) -> None:
    layout = Layout(12_224, 8)  # a block fills three pages
    path = tmp_path / "blocks"
    before = b"\xff" * (8 * layout.slot_bytes)
    contents = [memoryview(content_of(number, size)) for number, size in enumerate(sizes)]
    run = SlotRun(2, [key_of(number) for number in range(len(sizes))], contents)
    expected = bytearray(before)
    for slot, (key, content) in enumerate(zip(run.keys, contents, strict=True), run.slot):
        block = block_header(key, content) + bytes(content)
        block += bytes(-len(block) % 4096)
        begin = slot * layout.slot_bytes
        expected[begin : begin + len(block)] = block
    buffer = layout.buffer(5)
    full = SlotRun(0, [key_of(9)] * 5, [memoryview(bytes([9]) * 12_224)] * 5)
    for direct in [False, True][: 1 + (min(sizes) > 8128)]:
        path.write_bytes(before)
        file = BlockFile(path, FileOps(), writable=True)
        buffer.write_directly(file, full)  # leaves bytes in the memory
        path.write_bytes(before)
        if direct:
            assert buffer.write_directly(file, run)
        else:
            buffer.write(file, run)
        file.close()
        assert path.read_bytes() == expected


@pytest.mark.parametrize("size", [0, 7, 12_224])
def test_sources_of_any_format_are_written_as_bytes(tmp_path: Path, size: int) -> None:
    layout = Layout(12_224, 8)
    content = content_of(1, size)
    sources: list[Any] = [
        np.frombuffer(content, np.int8).data,
        memoryview(content).cast("c"),
        memoryview((ctypes.c_ubyte * size).from_buffer_copy(content)),
        np.frombuffer(content, np.uint8).reshape(size, 1).data,
        memoryview(content),
    ]
    keys = [key_of(number) for number in range(len(sources))]
    path, buffer = tmp_path / "blocks", layout.buffer(5)
    path.write_bytes(bytes(8 * layout.slot_bytes))
    file = BlockFile(path, FileOps(), writable=True)
    buffer.write(file, SlotRun(0, keys, sources))
    into = [memoryview(bytearray(size)) for _ in keys]
    contents, damaged = buffer.read(file, SlotRun(0, keys, into), direct=False)
    assert (list(map(bytes, contents)), damaged) == ([content] * len(keys), {})
    file.close()


def test_source_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(LAYOUT.slot_bytes))
    file = BlockFile(path, FileOps(), writable=True)
    with pytest.raises(ValueError, match="different structures"):
        LAYOUT.buffer(1).write(file, SlotRun(0, KEYS[:1], [np.zeros(SIZE, np.int16).data]))
    file.close()
    assert not any(path.read_bytes())


FORK = """
import mmap, os
from slime_tiered_store.tiers.ssd.run_buffer import device_memory
memory = device_memory(4096)
memory[:] = bytes([7]) * 4096
child = os.fork()
if not child:
    assert bytes(memory) == bytes([7]) * 4096
    others = [mmap.mmap(-1, 6 << 20) for _ in range(3)]
    del memory
    for other in others:
        other[:] = bytes(len(other))
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_process_has_its_own_memory() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", FORK], env=environment).returncode == 0


def test_each_buffer_begins_at_a_page_and_is_used_by_one_thread() -> None:
    buffers = RunBuffers(2, 3, 8192, 5000)
    with buffers.take() as one, buffers.take() as other:
        assert one is not other
        starts = [np.frombuffer(each._data, np.uint8).ctypes.data for each in (one, other)]
        assert [start % 4096 for start in starts] == [0, 0]
        assert abs(starts[0] - starts[1]) == 3 * 8192
    with buffers.take() as again:
        assert again in (one, other)


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
