"""The built site: each page can be reached, each picture and script is its own, and search works without a server."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"

pytestmark = pytest.mark.skipif(not SITE.exists(), reason="python -m docs.generate builds the site")

#: Attributes that make a browser load what they name; `href` does so in `link` only.
_LOADS = {"src", "srcset", "data", "poster", "background"}


class Loaded(HTMLParser):
    """Addresses of a page that a browser loads by itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.has_mermaid = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name in _LOADS or (tag == "link" and name == "href")):
                self.addresses.append(value)
            self.has_mermaid |= name == "class" and "mermaid" in (value or "")


def staged() -> list[str]:
    return sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))


def test_each_page_is_once_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == staged()


def test_each_page_is_built_and_has_a_title() -> None:
    assert len(staged()) > 30
    for name in staged():
        assert re.match(r"(?:<!--.*-->\s*)?# \S", (PAGES / name).read_text()), name
        assert "<h1" in (SITE / name).with_suffix(".html").read_text(), name


def test_pages_load_nothing_from_elsewhere() -> None:
    pages = sorted(SITE.rglob("*.html"))
    for page in pages:
        loaded = Loaded(page)
        assert loaded.addresses, page
        assert [address for address in loaded.addresses if urlsplit(address).netloc] == [], page
        # The theme would load a script for it.
        assert not loaded.has_mermaid, page
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_pictures_load_nothing_from_elsewhere() -> None:
    pictures = sorted(SITE.rglob("*.svg"))
    assert pictures
    for picture in pictures:
        assert not re.search(
            r"(?:href=\"|url\([\"']?|@import\s+[\"']?)(?:https?:)?//", picture.read_text()
        ), picture


def test_what_pages_load_is_there() -> None:
    for page in SITE.rglob("*.html"):
        if page.name == "404.html":  # its paths begin at the server's root
            continue
        for address in Loaded(page).addresses:
            path = urlsplit(address).path
            if path and not address.startswith("data:"):
                assert (page.parent / path).exists(), f"{page}: {address}"


def test_search_works_without_a_server() -> None:
    """A script has the index, since a page that was opened as a file may not fetch one."""
    index = (SITE / "search.js").read_text()
    found = json.loads(index[index.index("{") : index.rindex("}") + 1])
    assert {item["location"].partition("#")[0] for item in found["items"]} >= {
        "hooks.html",
        "plugins/auth.html",
    }
