"""OpenAI's API with exact tokens: those that the engine consumed and sampled, not a new encoding of their text.

The plugin serves ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` to any OpenAI client. For each chat
and completion, it sends a ``/generate`` request to an engine. If a chat continues recorded turns, this request begins,
by default, with the recorded tokens of these turns. See docs/plugins/openai.md.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_openai.plugin import OpenAI
from slime_openai.settings import Settings, add_openai_options

__all__ = ["OpenAI", "Settings", "add_options", "make_plugin", "requires"]

#: The component that this plugin needs, and the flag that loads the plugin which provides it.
requires = {"encoder": "--plugin radix_cache"}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags."""
    add_openai_options(parser)


def make_plugin(options: argparse.Namespace) -> OpenAI:
    """Make the plugin for one router. Raises SettingsError."""
    return OpenAI(Settings.from_options(options))
