"""One browser for all tests of pages, and the pictures that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dashboard.browser import Browser, browsing

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
_PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def keep_picture(request: pytest.FixtureRequest) -> Callable[[str, bytes], None]:
    """``keep_picture(name, png)`` checks a picture; ``--update-screenshots`` writes ``docs/images/NAME.png``."""

    def keep(name: str, png: bytes) -> None:
        assert png.startswith(_PNG)
        assert len(png) > 20_000  # an empty page is smaller
        if request.config.getoption("--update-screenshots"):
            IMAGES.mkdir(exist_ok=True)
            (IMAGES / f"{name}.png").write_bytes(png)

    return keep
