"""The plugin's factory. OpenTelemetry is imported only with ``--enable-trace``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from router_core import SettingsError, hookimpl
from router_core.flags import add_flags
from slime_otel.settings import Settings

if TYPE_CHECKING:
    from slime_otel.tracing import Tracing

__all__ = ["add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> Tracing | None:
    """Return the plugin, or None without ``--enable-trace``: then requests pay nothing for it. Raises SettingsError."""
    settings = Settings.from_options(options)
    if not settings.enabled:
        return None
    try:
        from slime_otel.tracing import Tracing, provider_for  # opentelemetry is heavy, and an extra
    except ImportError:
        raise SettingsError("--enable-trace needs OpenTelemetry: pip install 'slime-router[otel]'") from None
    return Tracing(provider_for(settings.url))
