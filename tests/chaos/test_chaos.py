"""Everything goes wrong at once, for ``SLIME_ROUTER_CHAOS_SECONDS``, and nobody is told anything wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from chaos.rampage import Rampage
from chaos.report import Report

#: By default each kind of trouble happens about once, and is short.
_SECONDS = float(os.environ.get("SLIME_ROUTER_CHAOS_SECONDS", "0"))
_SEED = int(os.environ.get("SLIME_ROUTER_CHAOS_SEED", "1"))
_REPORT = os.environ.get("SLIME_ROUTER_CHAOS_REPORT")
_PACE, _CLIENTS = (1.0, 200) if _SECONDS else (0.5, 16)


def _store(directory: Path) -> tuple[str, ...]:
    """Return flags of a router that keeps all that no request holds in a remote tier.

    The memory and the SSD before it have room for few records, so blocks always move between the tiers.
    """
    remote = directory / "remote"
    remote.mkdir(parents=True)
    memory = ("--radix-tree-max-size", "1", "--store-memory-bytes", str(256 << 10))
    ssd = ("--store-ssd", str(directory / "ssd"), "--store-ssd-bytes", str(1 << 20))
    return "--plugin", "tiered_store", *memory, *ssd, "--store-remote", f"file://{remote}"


async def _runs(directory: Path) -> dict[str, Report]:
    """Return the reports of runs with and without a store, at the same time: most of a run is waiting.

    By default there is only the run with a store.
    """
    runs = {"demoted": _store(directory / "store")}
    if _SECONDS:
        runs["kept"] = ()
    async with asyncio.TaskGroup() as running:
        tasks = {}
        for name, flags in runs.items():
            own = directory / name
            own.mkdir()
            run = Rampage(own, flags, seconds=_SECONDS, seed=_SEED, crowd=_CLIENTS, pace=_PACE)
            tasks[name] = running.create_task(run.run())
    return {name: task.result() for name, task in tasks.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.timeout(2 * _SECONDS + 300)
def test_no_client_gets_a_wrong_answer_or_waits_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = asyncio.run(_runs(tmp_path))
    told = "\n\n".join(f"Records {name}: {report}" for name, report in reports.items())
    with capsys.disabled():
        sys.stdout.write(f"\n{told}\n")
    Path(_REPORT or tmp_path / "report.txt").write_text(f"{told}\n")
    demoted = reports["demoted"]
    assert demoted.demoted is not None
    assert demoted.demoted["promotions"] > demoted.turns
    assert demoted.tiers["ssd"]["promotions"] > 0
    assert demoted.tiers["remote"]["promotions"] > 0
    for name, report in reports.items():
        assert not report.wrong, (name, report.wrong[0])
        assert report.conversations >= _CLIENTS
        assert report.exact > 0
        assert all(asked.outcome != "under way" for asked in report.asked)
