"""Changes that are not released yet, for the page of the changelog."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["with_unreleased"]


def with_unreleased(text: str, root: Path) -> str:
    """Return ``text``, the changelog of the repository ``root``, with the fragments of ``changelog.d`` as a section.

    Raises ValueError if ``text`` lacks the line at which releases begin.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["towncrier"]
    start = settings["start_string"]
    before, mark, after = text.partition(start)
    if not mark:
        raise ValueError(f"{settings['filename']}: wanted the line {start.strip()}, found none")
    sections = []
    for kind in settings["type"]:
        paths = sorted((root / settings["directory"]).glob(f"*.{kind['directory']}.md"))
        if paths:
            items = "".join(f"{_item(path.read_text().strip())}\n" for path in paths)
            sections.append(f"### {kind['name']}\n\n{items}")
    unreleased = "\n## Not released yet\n\n" + "\n".join(sections) + "\n" if sections else ""
    return before + mark + unreleased + after


def _item(fragment: str) -> str:
    """Return ``fragment`` as an item of a list. A fragment may be a list already."""
    return fragment if fragment.startswith("- ") else "- " + fragment.replace("\n", "\n  ")
