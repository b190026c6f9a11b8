from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deadlines import HANG_S

CRASHING = """
from contextlib import asynccontextmanager
from router_core import hookimpl

class Crashing:
    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router):
        router.tasks.start_soon(self.work)
        yield

    async def work(self):
        raise RuntimeError("the background work is broken")

def make_plugin(options):
    return Crashing()
"""


def test_router_exits_when_its_background_work_crashes(tmp_path: Path) -> None:
    Path(tmp_path, "crashing.py").write_text(CRASHING)
    done = subprocess.run(
        [sys.executable, "-m", "router_core", "--port", "0", "--middleware-paths", "crashing"],
        capture_output=True,
        timeout=HANG_S,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 1
    assert "the background work is broken" in done.stderr
