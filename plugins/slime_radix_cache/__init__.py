"""Plugin that records the exact tokens of texts, and returns them for a text.

In a ``/generate`` request, token ids replace the text: recorded ids where there are any, and the tokenizer's ids for
the rest. The answers of engines are recorded. ``/retrieve_from_text`` returns the exact tokens of a text. See
docs/plugins/radix_cache.md.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_radix_cache.plugin import RadixCache
from slime_radix_cache.retrieval.answer import Answer
from slime_radix_cache.retrieval.question import Question
from slime_radix_cache.retrieval.routes import Retrieval
from slime_radix_cache.settings import Settings, add_radix_cache_options

__all__ = [
    "Answer",
    "Question",
    "RadixCache",
    "Retrieval",
    "Settings",
    "add_options",
    "make_plugin",
    "provides",
    "requires",
]

#: Components that :meth:`RadixCache.setup` registers. ``"tokenizer"`` is registered only with ``--hf-checkpoint``.
provides = (
    "tokenizer",
    "encoder",
    "decode",
    "verdicts",
    "ownership",
    "side_records",
    "lost_sessions",
    "trajectories",
    "session_turns",
    "session_list",
)


def requires(options: argparse.Namespace) -> dict[str, str]:
    """Return the component that the plugin needs, and the flags that provide it; {} if ``--hf-checkpoint`` is given."""
    return {} if options.hf_checkpoint else {"tokenizer": "--hf-checkpoint PATH, or --plugin engine"}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_radix_cache_options(parser)


def make_plugin(options: argparse.Namespace) -> RadixCache:
    """Return the plugin for one router. Raises SettingsError."""
    return RadixCache(Settings.from_options(options))
