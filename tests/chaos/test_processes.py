"""Nothing outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.processes import Program
from deadlines import HANG_S
from ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_STARTER = """
import sys, time
from pathlib import Path
from chaos.processes import Program
program = Program(["engine", "--port", sys.argv[1]], Path(sys.argv[2]))
program.start()
print(program.pid, flush=True)
time.sleep(60)
"""


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_what_a_test_started_dies_when_the_test_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _STARTER, str(free_port()), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert not _gone(pid)
        starter.kill()
    deadline = time.monotonic() + HANG_S
    while not _gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _gone(pid)


def test_a_stopped_program_can_be_killed_and_started_again(tmp_path: Path) -> None:
    program = Program(["engine", "--port", str(free_port())], tmp_path / "log")
    try:
        program.start()
        first = program.pid
        program.send(signal.SIGSTOP)
        program.kill()
        assert program.ended
        program.start()
        assert program.pid != first
        assert program.open_files() > 0
        assert program.resident_bytes() > 0
    finally:
        program.kill()
