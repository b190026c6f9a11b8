"""Everything goes wrong at once, for ``SLIME_ROUTER_CHAOS_SECONDS``, and nobody is told anything wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from chaos.rampage import rampage

_SECONDS = float(os.environ.get("SLIME_ROUTER_CHAOS_SECONDS", "35"))
_SEED = int(os.environ.get("SLIME_ROUTER_CHAOS_SEED", "1"))
_REPORT = os.environ.get("SLIME_ROUTER_CHAOS_REPORT")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.timeout(2 * _SECONDS + 300)
def test_no_client_gets_a_wrong_answer_or_waits_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = asyncio.run(rampage(tmp_path, _SECONDS, _SEED))
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")
    Path(_REPORT or tmp_path / "report.txt").write_text(f"{report}\n")
    assert not report.wrong, report.wrong[0]
    assert report.conversations >= 200
    assert report.exact > 0
    assert all(asked.outcome != "under way" for asked in report.asked)
