"""OpenAI in, exact tokens out: the plugin ``openai``.

``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` for any OpenAI client. What is generated goes through
``/generate`` with the exact tokens of the conversation so far. See docs/plugins/openai.md.
"""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_openai.plugin import OpenAI
from slime_openai.settings import Settings, add_openai_options

__all__ = ["OpenAI", "Settings", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """The plugin's flags."""
    add_openai_options(parser)


def make_plugin(options: argparse.Namespace) -> OpenAI:
    """The plugin for one router. Raises SettingsError."""
    return OpenAI(Settings.from_options(options))
