"""The memory in use is counted, not the most that ever was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.counting import COUNTS_MEMORY

_PROGRAM = """
from chaos.counting import used_bytes

def objects(size):
    return [bytes(200) for _ in range(size // 233)]

before = used_bytes()
many, kept = objects(32 << 20), objects(4 << 20)
del many
print(used_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library")
def test_leak_of_four_mib_is_seen_and_freed_memory_is_not() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **COUNTS_MEMORY}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, check=True, text=True
    )
    assert 4 << 20 <= int(ended.stdout) < 6 << 20
