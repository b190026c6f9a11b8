"""Text in, exact tokens out: the plugin ``radix_cache``.

``/generate`` with text is sent on with token ids that are known to be right. The engines' answers are recorded, and
``/retrieve_from_text`` gives the exact tokens of a text back. See docs/plugins/radix_cache.md.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_radix_cache.plugin import RadixCache
from slime_radix_cache.retrieval.answer import Answer
from slime_radix_cache.retrieval.question import Question
from slime_radix_cache.retrieval.routes import Retrieval
from slime_radix_cache.settings import Settings, add_radix_cache_options

__all__ = ["Answer", "Question", "RadixCache", "Retrieval", "Settings", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """The plugin's flags."""
    add_radix_cache_options(parser)


def make_plugin(options: argparse.Namespace) -> RadixCache:
    """The plugin for one router. Raises SettingsError."""
    return RadixCache(Settings.from_options(options))
