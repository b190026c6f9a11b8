"""Wheels of this repository's distributions, built as a packager would."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "build_wheel"]

ROOT = Path(__file__).parent.parent


def build_wheel(source: Path, into: Path) -> Path:
    """Build the wheel of the project in ``source`` in the directory ``into``, and return it.

    Uses the hatchling that is installed. Without one, pip fetches it, which needs a network.
    """
    if importlib.util.find_spec("hatchling") is not None:
        command = ["hatchling", "build", "-t", "wheel", "-d", str(into)]
    else:
        command = ["pip", "wheel", "--no-deps", "--wheel-dir", str(into), "."]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel
