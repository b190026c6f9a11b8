"""The file of blocks: direct transfers, and file systems that refuse them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.block_file import BlockFile
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.run_buffer import device_memory
from tiered_store.tiers.disks import is_direct, write_any

PAGE = 4096
SIZE = 8 * PAGE
REFUSAL = "the file system refuses direct I/O, so the page cache is used"


class Recorder:
    """Calls of the disk: is it direct, its offset and its bytes. A call moves at most ``at_most`` bytes.

    ``refusal``: error number of direct calls.
    """

    def __init__(self, at_most: int = SIZE, refusal: int | None = None) -> None:
        self.calls: list[tuple[bool, int, int]] = []
        self._at_most = at_most
        self._refusal = refusal

    def _begin(self, fd: int, piece: Buffer, offset: int) -> int:
        size = min(len(piece), self._at_most)
        self.calls.append((is_direct(fd), offset, size))
        if is_direct(fd) and self._refusal is not None:
            raise OSError(self._refusal, os.strerror(self._refusal))
        return size

    def pwritev(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        size = self._begin(fd, pieces[0], offset)
        write_any(fd, bytes(pieces[0][:size]), offset)
        return size

    def preadv(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        size = self._begin(fd, pieces[0], offset)
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            content = os.pread(file.fileno(), size, offset)
        memoryview(pieces[0])[: len(content)] = content
        return len(content)

    @property
    def ops(self) -> FileOps:
        return FileOps(pwritev=self.pwritev, preadv=self.preadv)


def written(file: BlockFile, source: memoryview, offset: int, *, direct: bool) -> None:
    """Write as the tier does: through the page cache if not directly."""
    if not direct or not file.write_directly(source, offset):
        file.write(source, offset)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(Random(1).randbytes(SIZE))
    return path


def test_direct_transfers_bypass_the_page_cache(path: Path) -> None:
    disk = Recorder()
    file = BlockFile(path, disk.ops, writable=True)
    file.write(device_memory(PAGE), 0)
    assert file.write_directly(device_memory(2 * PAGE), PAGE)
    file.read(device_memory(PAGE), 0, direct=False)
    file.read(device_memory(PAGE), 0, direct=True)
    file.close()
    assert disk.calls == [(False, 0, PAGE), (True, PAGE, 2 * PAGE), (False, 0, PAGE), (True, 0, PAGE)]


def test_both_ways_see_what_the_other_wrote(path: Path) -> None:
    file = BlockFile(path, FileOps(), writable=True)
    into, random = device_memory(SIZE), Random(2)
    expected = bytearray(path.read_bytes())
    for _ in range(200):
        begin = random.randrange(8)
        end = random.randrange(begin + 1, 9)
        source = device_memory((end - begin) * PAGE)
        source[:] = random.randbytes(len(source))
        written(file, source, begin * PAGE, direct=random.random() < 0.5)
        expected[begin * PAGE : end * PAGE] = source
        assert file.read(into, 0, direct=random.random() < 0.5) == SIZE
        assert into == expected
    file.sync()
    file.close()
    assert path.read_bytes() == expected


def test_transfer_goes_on_directly_after_whole_pages(path: Path) -> None:
    disk = Recorder(at_most=3 * PAGE)
    file = BlockFile(path, disk.ops, writable=True)
    source, into = device_memory(SIZE), device_memory(SIZE)
    source[:] = Random(3).randbytes(SIZE)
    assert file.write_directly(source, 0)
    assert file.read(into, 0, direct=True) == SIZE
    file.close()
    assert into == source
    assert disk.calls == 2 * [(True, 0, 3 * PAGE), (True, 3 * PAGE, 3 * PAGE), (True, 6 * PAGE, 2 * PAGE)]


@pytest.mark.parametrize("at_most", [0, 1000, PAGE + 512])
def test_direct_write_that_stops_within_a_page_is_not_complete(path: Path, at_most: int) -> None:
    disk = Recorder(at_most)
    file = BlockFile(path, disk.ops, writable=True)
    assert not file.write_directly(device_memory(SIZE), 0)
    file.close()
    assert disk.calls == [(True, 0, at_most)]


def test_rest_of_a_direct_read_at_an_odd_place_goes_through_the_page_cache(path: Path) -> None:
    disk = Recorder(PAGE + 512)
    file = BlockFile(path, disk.ops, writable=True)
    into = device_memory(SIZE)
    assert file.read(into, 0, direct=True) == SIZE
    file.close()
    assert into == path.read_bytes()
    assert [call[0] for call in disk.calls] == [True] + 7 * [False]


def test_read_behind_the_end_is_short(path: Path) -> None:
    os.truncate(path, SIZE - 100)
    file = BlockFile(path, FileOps(), writable=False)
    for direct in (False, True):
        assert file.read(device_memory(SIZE), 0, direct=direct) == SIZE - 100
        assert file.read(device_memory(PAGE), SIZE, direct=direct) == 0
    file.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at_open", [False, True])
def test_refused_direct_transfer_is_said_once_and_not_tried_again(
    path: Path, at_open: bool, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return os.open(path, flags, mode)

    caplog.set_level(logging.INFO)
    disk = Recorder(refusal=code)
    file = BlockFile(path, replace(disk.ops, os_open=refuse if at_open else os.open), writable=True)
    source, into = device_memory(SIZE), device_memory(SIZE)
    source[:] = Random(5).randbytes(SIZE)
    for _ in range(2):
        assert not file.write_directly(source, 0)
        file.write(source, 0)
        assert file.read(into, 0, direct=True) == SIZE
        assert into == source
    file.sync()
    file.close()
    assert [record.message for record in caplog.records] == [f"{path}: {REFUSAL}"]
    assert sum(direct for direct, _, _ in disk.calls) == (0 if at_open else 1)


def test_other_errors_are_raised_and_leave_nothing_open(path: Path) -> None:
    def fail(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.open(path, flags, mode)

    def broken(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Input/output error"):
        BlockFile(path, FileOps(os_open=fail), writable=True)
    file = BlockFile(path, FileOps(pwritev=broken, preadv=broken), writable=True)
    with pytest.raises(OSError, match="Input/output error"):
        file.write_directly(device_memory(SIZE), 0)
    with pytest.raises(OSError, match="Input/output error"):
        file.write(device_memory(SIZE), 0)
    with pytest.raises(OSError, match="Input/output error"):
        file.read(device_memory(SIZE), 0, direct=True)
    file.close()
    assert os.listdir("/proc/self/fd") == before
