"""Installs a distribution into an empty environment, and runs the router there."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

from distributions import ReleaseError, run

__all__ = ["install", "try_out"]


def install(requirement: str, environment: Path) -> Path:
    """Install ``requirement`` into a new ``environment``, and return its Python. Raises ReleaseError if pip fails."""
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", requirement)
    return python


def try_out(python: Path, version: str, work: Path) -> None:
    """Run ``--version``, ``plugins`` and the demo from an empty directory. Raises ReleaseError if one of them fails."""
    work.mkdir()
    script = python.with_name("slime-router")
    told = run(script, "--version", cwd=work).strip()
    if told != f"slime-router {version}":
        raise ReleaseError(f"slime-router --version: wanted 'slime-router {version}', found {told!r}")
    if "radix_cache" not in run(script, "plugins", cwd=work):
        raise ReleaseError("slime-router plugins does not list radix_cache")
    run(script, "demo", cwd=work)
