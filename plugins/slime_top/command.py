"""The command: reads figures from the router again and again, and shows them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live

from router_core.errors import SettingsError
from slime_start.commands import CommandParser
from slime_top.figures import Figures, History
from slime_top.keyboard import keys_one_by_one, wait_for_key
from slime_top.scrape import RefusedKey, RouterClient, Unreachable
from slime_top.screen import frame

__all__ = ["main"]

_KEY_VARIABLE = "SLIME_ROUTER_ADMIN_API_KEY"
_NEEDS_KEY = "give the admin key by --api-key-file FILE or --api-key-env NAME"


def _parser() -> CommandParser:
    parser = CommandParser(
        failure=SettingsError,
        prog="slime-router top",
        description="Show a router at the terminal: its workers, traffic, latencies, tokens and exactness. q quits.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="address of the router (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the admin key, if the router has one"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME",
        help=f"environment variable with the admin key (default: {_KEY_VARIABLE}, if it is set)",
    )  # fmt: skip
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two frames (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame, after one interval, and end")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 1 if the router refuses the key or, with ``--once``, does not answer; otherwise 0."""
    options = _parser().parse_args(list(argv))
    if not _is_address(options.url):
        raise SettingsError(f"--url: wanted an address such as http://127.0.0.1:30000, got {options.url!r}")
    if not 0.1 <= options.interval <= 3600:
        raise SettingsError(f"--interval: wanted 0.1 to 3600 seconds, got {options.interval:g}")
    key = _key(options.api_key_file, options.api_key_env)
    url = options.url.rstrip("/")
    try:
        with RouterClient(url, key) as client:
            if options.once:
                _print_once(client, url, options.interval)
            else:
                _watch(client, url, options.interval)
    except KeyboardInterrupt:
        pass
    except (RefusedKey, Unreachable) as error:
        cure = f"; {_NEEDS_KEY}" if isinstance(error, RefusedKey) else ""
        sys.stderr.write(f"slime-router top: {url}: {error}{cure}\n")
        return 1
    return 0


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid address or port
        return False


def _key(file: Path | None, variable: str | None) -> str | None:
    """Return the key, None without one. Raises SettingsError."""
    key = _given_key(file, variable)
    if key is not None and not all("!" <= sign <= "~" for sign in key):
        raise SettingsError("the admin key: wanted printable ASCII characters, and no spaces")
    return key


def _given_key(file: Path | None, variable: str | None) -> str | None:
    if file is not None:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--api-key-file: {error}") from None
    if variable is not None and not os.environ.get(variable):
        raise SettingsError(f"--api-key-env: the variable {variable} is not set")
    return os.environ.get(variable or _KEY_VARIABLE) or None


def _print_once(client: RouterClient, url: str, interval_s: float) -> None:
    history = History()
    history.add(client.scrape())
    time.sleep(interval_s)  # rates need two scrapes
    history.add(client.scrape())
    Console().print(frame(history.figures(time.time()), url))


def _watch(client: RouterClient, url: str, interval_s: float) -> None:
    """Show frames until q is pressed. While the router does not answer, the last figures stay. Raises RefusedKey."""
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()):
        raise SettingsError("wanted a terminal as standard input and output: add --once for one frame")
    history = History()
    figures: Figures | None = None
    answered_at = time.monotonic()
    with keys_one_by_one(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            trouble = ""
            try:
                history.add(client.scrape())
                figures, answered_at = history.figures(time.time()), time.monotonic()
            except Unreachable as error:
                trouble = f"no answer for {time.monotonic() - answered_at:.0f} s, asking again: {error}"
            live.update(frame(figures, url, console.height, trouble), refresh=True)
            if wait_for_key("q", interval_s):
                return
