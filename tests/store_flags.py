"""Flags of a tier that outlives the router."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tier_flags"]


def tier_flags(tier: str, path: Path, size: int = 1 << 20) -> tuple[str, ...]:
    """Return the flags of a tier in ``path``: "ssd", an SSD tier of ``size`` bytes, or "file", a remote store."""
    if tier == "ssd":
        return "--store-ssd", str(path), "--store-ssd-bytes", str(size)
    path.mkdir(exist_ok=True)
    return "--store-remote", f"file://{path}"
