"""The flags of prefill/decode disaggregation, as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass

from router_core import SettingsError
from router_core.errors import BadRequest
from router_core.flags import flag, read_flags
from router_core.workers import worker_url

__all__ = ["Settings"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the command line. ``enabled``: generations go to pairs of workers.

    ``prefill``: the URLs and bootstrap ports of prefill workers. ``decode``: the URLs of decode workers.
    """

    enabled: bool = flag(
        "--pd-disaggregation", default=False, help="give each generation to a prefill and a decode worker"
    )
    prefill: tuple[tuple[str, int | None], ...] = flag(
        "--prefill", nargs="+", action="append", metavar="URL [PORT]",
        help="a prefill worker, and its bootstrap port (or none); may be repeated",
    )  # fmt: skip
    decode: tuple[str, ...] = flag(
        "--decode", action="append", metavar="URL", help="a decode worker; may be repeated"
    )
    mini_lb: bool = flag(
        "--mini-lb", default=False,
        help="as --policy random; needs --pd-disaggregation, --prefill and --decode",
    )  # fmt: skip

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        prefill = tuple(_prefill(words) for words in options.prefill or ())
        decode = tuple(_url("--decode", url) for url in options.decode or ())
        settings = read_flags(cls, options, prefill=prefill, decode=decode)
        both = [*(url for url, _ in settings.prefill), *settings.decode]
        twice = {url for url in both if both.count(url) > 1}
        if twice:
            raise SettingsError(f"--prefill and --decode: {', '.join(sorted(twice))} is named twice")
        if settings.mini_lb and not (settings.enabled and settings.prefill and settings.decode):
            raise SettingsError("--mini-lb: wanted --pd-disaggregation, --prefill and --decode with it")
        for name, given in (("--prefill", settings.prefill), ("--decode", settings.decode)):
            if given and not settings.enabled:
                logger.warning("%s has no effect: it is for --pd-disaggregation", name)
        if settings.enabled and options.worker_urls:
            logger.warning(
                "--worker-urls has no effect on generations: with --pd-disaggregation, generations go to the workers"
                " of --prefill and --decode"
            )
        return settings


def _prefill(words: list[str]) -> tuple[str, int | None]:
    """Parse ``URL [BOOTSTRAP_PORT|none]``. Raises SettingsError."""
    url, *port = words
    if not port or (len(port) == 1 and port[0].lower() == "none"):
        return _url("--prefill", url), None
    if len(port) > 1 or not port[0].isdecimal() or not 0 < int(port[0]) < 65536:
        raise SettingsError(f"--prefill: wanted URL and a bootstrap port or none, got {' '.join(words)!r}")
    return _url("--prefill", url), int(port[0])


def _url(name: str, url: str) -> str:
    try:
        return worker_url(url)
    except BadRequest as error:
        raise SettingsError(f"{name}: {error}") from None
