"""The plugin: a Sender around the proxy that gives each generation to a pair of workers."""

from __future__ import annotations

import argparse

from router_core import SettingsError, hookimpl
from router_core.errors import BadRequest
from router_core.flags import add_flags
from router_core.router import Router
from router_core.sender import Sender
from slime_pd.pairs import Pairs
from slime_pd.settings import Settings
from slime_sglang.facts import BOOTSTRAP_PORT

__all__ = ["Disaggregation", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Disaggregation | None:
    """Make the plugin; None without ``--pd-disaggregation``. Raises SettingsError."""
    settings = Settings.from_options(options)
    return Disaggregation(settings) if settings.enabled else None


class Disaggregation:
    """Gives each generation to a pair of workers, by the hook ``sender``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @hookimpl
    def setup(self, router: Router) -> None:
        """Register the first workers. Raises SettingsError for a URL that is not allowed."""
        router.pool.require("prefill", "decode")
        try:
            for url, port in self.settings.prefill:
                router.addresses.check(url)
                router.start_with(url, worker_type="prefill", facts={BOOTSTRAP_PORT: port})
            for url in self.settings.decode:
                router.addresses.check(url)
                router.start_with(url, worker_type="decode")
        except BadRequest as error:
            raise SettingsError(f"--prefill and --decode: {error}") from None

    @hookimpl
    def sender(self, inner: Sender, router: Router) -> Sender:
        return Pairs(router, inner)
