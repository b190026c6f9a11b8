"""Pages of the site: the file of the repository for each page, and the links between pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent.parent

#: Files outside of docs/ that are pages of the site, and their paths on the site.
_ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks/scripts.md",
}

#: Code, in which nothing is a link: a fenced block, an indented line or a span.
_CODE = re.compile(r"(^```.*?^```|^    .*?$|(?<!`)`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))|(\b(?:src|href|srcset)=\")([^\"\s]+)(\")")


def sources() -> dict[str, str]:
    """Return the path in the repository of each hand-written page, and its path on the site."""
    docs = {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*.md"))
    }
    examples = {
        path.relative_to(ROOT).as_posix(): f"examples/{path.parent.name}.md"
        for path in sorted((ROOT / "examples").glob("*/README.md"))
    }
    index = {"examples/README.md": "examples/index.md"} if (ROOT / "examples/README.md").exists() else {}
    return _ELSEWHERE | docs | examples | index


def assets() -> dict[str, str]:
    """Return the other files of docs/ that a page may show, and their paths on the site."""
    kinds = (".css", ".js", ".png", ".svg", ".yaml")
    return {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*"))
        if path.suffix in kinds
    }


class Links:
    """Links of the repository, as links of the site. Collects the files that a page links to."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages
        #: Files that are not pages, and their paths on the site.
        self.files: dict[str, str] = {}

    def rewrite(self, text: str, source: str) -> str:
        """Return the text of the page ``source`` with links that work on the site."""

        def renamed(match: re.Match[str]) -> str:
            before, target, after = match.groups()[:3] if match[1] else match.groups()[3:]
            return f"{before}{self._target(target, source)}{after}"

        return outside_code(text, lambda part: _LINK.sub(renamed, part))

    def _target(self, target: str, source: str) -> str:
        path, mark, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return target
        wanted = posixpath.normpath(PurePosixPath(source).parent / path)
        here = PurePosixPath(self._pages[source]).parent.as_posix()
        return posixpath.relpath(self._page(wanted), here) + mark + anchor

    def _page(self, path: str) -> str:
        for known in (path, f"{path}/README.md"):
            if known in self._pages:
                return self._pages[known]
        if not (ROOT / path).is_file():
            return path  # a link that the strict build refuses
        self.files[path] = f"source/{path}.txt"  # a browser shows text, and saves most other files
        return self.files[path]


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return ``text`` with all parts changed that are not code."""
    return "".join(part if n % 2 else change(part) for n, part in enumerate(_CODE.split(text)))
