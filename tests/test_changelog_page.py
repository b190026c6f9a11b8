"""The page of the changelog shows changes that are not released yet."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Tests run on the installed package, which has no docs.
with_unreleased = runpy.run_path(str(ROOT / "docs" / "generate" / "changelog.py"))["with_unreleased"]
START = "<!-- release notes start -->\n"


def test_page_has_each_fragment_under_its_kind() -> None:
    page = with_unreleased((ROOT / "CHANGELOG.md").read_text(), ROOT)
    sections = page.partition("\n## Not released yet\n")[2].split("\n### ")
    by_kind = {section.partition("\n")[0].lower(): section for section in sections[1:]}
    fragments = sorted((ROOT / "changelog.d").glob("*.md"))
    for path in fragments:
        kind = path.name.split(".")[-2]
        assert path.read_text().strip().splitlines()[0] in by_kind[kind], path.name
    assert bool(fragments) == bool(by_kind)


def test_fragments_of_several_lines_and_lists_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    (folder / "a.fixed.md").write_text("One.\nTwo.\n")
    (folder / "b.fixed.md").write_text("- Three.\n- Four.\n")
    (folder / "+c.added.md").write_text("Five.\n")
    expected = (
        "\n## Not released yet\n\n### Added\n\n- Five.\n\n### Fixed\n\n- One.\n  Two.\n- Three.\n- Four.\n\n"
    )
    assert with_unreleased(f"# Changelog\n\n{START}## 1.0\n", tmp_path) == (
        f"# Changelog\n\n{START}{expected}## 1.0\n"
    )


def test_page_without_fragments_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    page = f"# Changelog\n\n{START}\n## 1.0\n"
    assert with_unreleased(page, tmp_path) == page


def test_changelog_without_the_line_of_towncrier_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted the line <!-- release notes start -->"):
        with_unreleased("# Changelog\n", ROOT)
