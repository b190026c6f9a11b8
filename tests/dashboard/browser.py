"""A headless Chromium, from Debian's packages, for tests of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
import pytest

from programs import program

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["WINDOW", "Browser", "browsing"]

#: Seconds until the page shows what is expected.
_PATIENCE_S = 20.0
#: Width and height of the window.
WINDOW = (1360, 900)
#: The visible text of the first element of a selector; innerText of a hidden one would be its text.
_VISIBLE = (
    "[document.querySelector(arguments[0])].map((one) => (one?.checkVisibility() ? one.innerText : ''))[0]"
)
_T = TypeVar("_T")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--no-default-browser-check", "--force-color-profile=srgb", "--hide-scrollbars", "--lang=en-US",
    "--no-proxy-server",
    # it looks for servers of its maker at each start, whatever the other flags say
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


class Browser:
    """The browser; its calls block, so they run in a thread while the router serves on the event loop."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    async def run(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call ``function`` in a thread."""
        return await anyio.to_thread.run_sync(partial(function, *arguments))

    async def open(self, url: str, theme: str = "light") -> None:
        """Open ``url`` in a window of the usual size, and in a tab that knows no key."""
        await self.resize(*WINDOW)
        await self.run(self.driver.get, f"{url}/static/icon.svg" if url.endswith("/ui") else url)
        await self.js(
            "sessionStorage.clear(); localStorage.setItem('slime-router-theme', arguments[0])", theme
        )
        await self.problems()  # of earlier pages
        await self.run(self.driver.get, url)

    async def js(self, script: str, *arguments: object) -> Any:
        """Run ``script`` in the page, and return its result."""
        return await self.run(self.driver.execute_script, script, *arguments)

    async def text(self, selector: str) -> str:
        """Return the visible text of the first element of ``selector``."""
        return str(await self.js(f"return {_VISIBLE}", selector))

    async def until(self, condition: str, *arguments: object) -> Any:
        """Wait until the JavaScript expression ``condition`` is truthy, and return its value."""
        with anyio.move_on_after(_PATIENCE_S):
            while True:
                found = await self.js(f"return {condition}", *arguments)
                if found:
                    return found
                await anyio.sleep(0.05)
        page = await self.js("return document.body.innerText")
        raise AssertionError(f"never true: {condition}\nthe page:\n{page}")

    async def until_quiet(self, number: str, quiet_s: float = 0.5) -> None:
        """Wait until the JavaScript expression ``number`` has not changed for ``quiet_s``."""
        before = None
        with anyio.fail_after(_PATIENCE_S):
            while (now := await self.js(f"return {number}")) != before:
                before = now
                await anyio.sleep(quiet_s)

    async def until_text(self, selector: str, part: str) -> str:
        """Wait until the visible text of ``selector`` contains ``part``."""
        await self.until(f"({_VISIBLE}).includes(arguments[1])", selector, part)
        return await self.text(selector)

    async def press(self, *keys: str) -> None:
        """Press ``keys``, one after the other, at the focused element."""
        from selenium.webdriver import ActionChains  # it is not always installed

        await self.run(ActionChains(self.driver).send_keys(*keys).perform)

    async def click(self, selector: str) -> None:
        """Click the first element of ``selector``."""
        await self.js("document.querySelector(arguments[0]).click()", selector)

    async def enter(self, selector: str, text: str) -> None:
        """Replace the text of a field by ``text``, and submit its form."""
        await self.js(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            " field.form.requestSubmit()",
            selector,
            text,
        )

    async def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        await self.run(self.driver.set_window_size, width, height)

    async def screenshot(self) -> bytes:
        """Return a PNG of the whole page."""
        outside = "window.outerHeight - window.innerHeight"  # the window's frame, which is not drawn
        height = int(await self.js(f"return document.documentElement.scrollHeight + {outside}"))
        await self.resize(WINDOW[0], height)
        await anyio.sleep(0.3)  # the plots are drawn anew
        return await self.run(self.driver.get_screenshot_as_png)

    async def problems(self) -> list[str]:
        """Return errors and violations of the policy that the browser has logged since the last call."""
        entries = await self.run(self.driver.get_log, "browser")
        return [str(entry["message"]) for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start the browser with the empty directory ``profile``; skip the test where there is none."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install selenium"
    )
    chromium, chromedriver = program("chromium"), program("chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={WINDOW[0]},{WINDOW[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
