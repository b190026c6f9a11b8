"""Health checks of workers: probes, quarantine, return."""

from slime_health.plugin import Health, add_options, make_plugin
from slime_health.settings import Settings

__all__ = ["Health", "Settings", "add_options", "make_plugin"]
