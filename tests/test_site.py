"""The built site: each page can be reached, each picture and script is its own, and search works without a server."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from router_core.hooks import hook_names

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"

pytestmark = pytest.mark.skipif(not SITE.exists(), reason="python -m docs.generate builds the site")

#: Attributes that make a browser load what they name; `href` does so in `link` only.
_LOADS = {"src", "srcset", "data", "poster", "background"}


class LoadedAddresses(HTMLParser):
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
        loaded = LoadedAddresses(page)
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
        for address in LoadedAddresses(page).addresses:
            path = urlsplit(address).path
            if path and not address.startswith("data:"):
                assert (page.parent / path).exists(), f"{page}: {address}"


def test_each_file_of_a_diagram_is_on_a_page() -> None:
    pages = [LoadedAddresses(page).addresses for page in SITE.rglob("*.html")]
    shown = {Path(address).name for addresses in pages for address in addresses if "diagrams/" in address}
    assert shown == {path.name for path in (ROOT / "docs" / "diagrams").iterdir()}


def test_search_works_without_a_server() -> None:
    """A script has the index, since a page that was opened as a file may not fetch one."""
    index = (SITE / "search.js").read_text()
    found = json.loads(index[index.index("{") : index.rindex("}") + 1])
    assert {item["location"].partition("#")[0] for item in found["items"]} >= {
        "hooks.html",
        "plugins/auth.html",
    }


# the reference


def reference(name: str) -> str:
    return (PAGES / "reference" / name).read_text()


def test_the_reference_has_each_flag_that_the_plugin_pages_tell() -> None:
    """Those pages have all flags, see test_docs.py."""
    told = {
        flag
        for page in [*sorted((ROOT / "docs" / "plugins").glob("*.md")), ROOT / "docs" / "operations.md"]
        for flag in re.findall(r"^\| `(--[a-z0-9-]+)", page.read_text(), re.MULTILINE)
    }
    assert len(told) > 60
    assert [flag for flag in sorted(told) if not re.search(rf"{flag}(?![\w-])", reference("flags.md"))] == []


def test_the_reference_has_each_hook() -> None:
    assert set(re.findall(r"^## (\w+)$", reference("hooks.md"), re.MULTILINE)) == set(hook_names())


def test_the_reference_has_each_metric() -> None:
    told = re.findall(r"`((?:slime|smg)_\w+)`", (ROOT / "docs" / "plugins" / "metrics.md").read_text())
    assert len(told) > 30
    assert [name for name in told if f"`{name}`" not in reference("metrics.md") and name != "smg_"] == []


def test_the_reference_has_each_operation() -> None:
    described = (ROOT / "docs" / "openapi.yaml").read_text()
    operations = re.findall(r"^ +operationId: (\w+)$", described, re.MULTILINE)
    assert len(operations) > 50
    pages = "".join(page.read_text() for page in sorted((SITE / "reference" / "http").glob("*.html")))
    assert [name for name in operations if f'id="{name.lower()}"' not in pages] == []


def test_reference_has_the_error_codes_of_the_operations_page() -> None:
    told = re.findall(
        r"`([A-Z]+_[A-Z_]+)`", (ROOT / "docs" / "operations.md").read_text().partition("\n## Errors")[2]
    )
    assert "QUEUE_FULL" in told
    assert [code for code in told if f"`{code}`" not in reference("errors.md")] == []


def test_the_reference_has_the_python_client() -> None:
    assert re.findall(r"^## (\w+)", reference("client.md"), re.MULTILINE)[:2] == ["Client", "AsyncClient"]
    assert "### AsyncClient.fill()" in reference("client.md")
