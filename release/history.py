"""Checks of the changelog of a release."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["changelog_faults"]

#: The section of a release: ``## 1.2.3 (2026-01-31)``.
_HEADING = re.compile(r"^## (\S+) \(", re.MULTILINE)
_TAG = re.compile(r"v\d+\.\d+.*")


def changelog_faults(
    version: str, tags: Sequence[str], changelog: str, fragments: Sequence[str]
) -> list[str]:
    """Return what is wrong with the changelog of a commit with ``tags``; an empty list if no tag names a release."""
    releases = [tag for tag in tags if _TAG.fullmatch(tag)]
    faults = [f"the tag {tag} is not of version {version}" for tag in releases if tag != f"v{version}"]
    if releases:
        faults += [
            f"changelog.d/{name} is not in CHANGELOG.md yet: run towncrier build" for name in fragments
        ]
        if version not in _HEADING.findall(changelog):
            faults.append(f"CHANGELOG.md has no section of {version}")
    return faults
