"""Dashboard: pages at /ui with the fleet, its traffic and recorded sessions."""

from slime_dashboard.plugin import Dashboard, add_options, make_plugin
from slime_dashboard.settings import Settings

__all__ = ["Dashboard", "Settings", "add_options", "make_plugin"]
