"""Routed experts for rollout routing replay (R3): requested from workers, and passed on unchanged.

With the plugin ``radix_cache`` they are also recorded.

SGLang returns ``meta_info.routed_experts`` if a request has ``return_routed_experts`` and the server runs with
``--enable-return-routed-experts``. See docs/plugins/r3.md.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_r3.plugin import R3
from slime_r3.settings import Settings, add_r3_options

__all__ = ["R3", "Settings", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_r3_options(parser)


def make_plugin(options: argparse.Namespace) -> R3:
    """Return the plugin for one router. Raises SettingsError."""
    return R3(Settings.from_options(options))
