"""The version of the distribution."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["release"]


@cache
def release() -> str:
    """Return the version of the distribution that is installed."""
    try:
        return version("slime-router")
    except PackageNotFoundError:
        return "(not installed)"
