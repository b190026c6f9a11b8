"""An embedded engine with SGLang's HTTP protocol. It runs a tiny language model, or a real one, and needs no GPU.

The plugin (``--plugin engine --engine-workers 2``) starts engines in the router's process and registers them. The
command ``slime-router engine`` serves one engine. ``slime_engine.app.make_app`` returns the ASGI application.
"""

from __future__ import annotations

import argparse

from router_core import SettingsError, hookimpl
from slime_engine.options import add_engine_options, as_flag, settings_from
from slime_engine.settings import Settings

__all__ = ["Settings", "add_options", "make_plugin", "provides"]

#: The components that :meth:`EnginePlugin.setup` registers, unless they are registered already.
provides = ("tokenizer",)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--engine-workers`` and the engine's own flags as ``--engine-...``."""
    parser.add_argument(
        "--engine-workers", type=int, default=1, metavar="N", help="embedded engines to start (default 1)"
    )
    add_engine_options(parser, "engine-")


def make_plugin(options: argparse.Namespace) -> object:
    """Return the plugin for the parsed command line. Raises SettingsError."""
    # imported here, since declaring the flags needs none of these libraries
    from slime_engine.backends import check_backend  # numpy, tokenizers and jinja2
    from slime_engine.plugin import EnginePlugin  # numpy, tokenizers and jinja2

    if options.engine_workers < 1:
        raise SettingsError(f"--engine-workers must be at least 1, got {options.engine_workers}")
    try:
        settings = settings_from(options, "engine-")
        check_backend(settings)
    except ValueError as error:
        raise SettingsError(as_flag(error, "engine-")) from None
    return EnginePlugin(settings, options.engine_workers)
