"""The thread that commits writes and removals of a directory."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from deadlines import HANG_S
from slime_tiered_store.tiers.ssd.committer import Committer
from slime_tiered_store.tiers.ssd.directory import Layout, SsdDirectory
from slime_tiered_store.tiers.ssd.runs import SlotRun
from tiered_store.tiers.disks import BLOCK_BYTES, SlowDisk, content_of, key_of


def write(committer: Committer, number: int) -> Future[None]:
    return committer.write([SlotRun(number, [key_of(number)], [memoryview(content_of(number))])])


def test_write_that_cannot_begin_fails_and_so_do_those_with_it(tmp_path: Path) -> None:
    disk = SlowDisk()
    directory = SsdDirectory(tmp_path, Layout(BLOCK_BYTES, 8), disk.ops)
    committer = Committer(directory, "write")
    first = write(committer, 0)
    assert disk.began.wait(HANG_S)
    before, bad, after, cancelled = [write(committer, number) for number in range(1, 5)]
    bad.set_running_or_notify_cancel()  # the committer cannot do so again
    cancelled.cancel()
    disk.go.set()
    for each in (before, bad, after):
        with pytest.raises(RuntimeError, match="unexpected state"):
            each.result(HANG_S)
    assert first.result(HANG_S) is None
    assert write(committer, 2).result(HANG_S) is None
    assert {key for _, key in directory.log.table.held()} == {key_of(0), key_of(2)}
    committer.close()
    directory.close()
