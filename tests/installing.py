"""Example packages, installed as pip installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from wheels import build_wheel

__all__ = ["install"]


def install(example: Path, scratch: Path) -> Path:
    """Build ``example``, and install it alone into a fresh directory below ``scratch``. Return that directory."""
    wheel = build_wheel(example, scratch / "wheel")
    site = scratch / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    return site
