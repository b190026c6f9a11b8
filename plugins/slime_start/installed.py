"""The entry points of the installed packages."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import cache
from importlib.metadata import EntryPoints

__all__ = ["entry_points"]


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of ``group``, as they were when this ``sys.path`` was first searched."""
    return _found(group, *sys.path)


@cache  # it reads the files of all installed packages, which takes 10 ms
def _found(group: str, *_: str) -> EntryPoints:
    return importlib.metadata.entry_points(group=group)
