"""Sessions for agents that cannot set headers: named by path, body or API key; with records and samples."""

from slime_sessions.plugin import Sessions, add_options, make_plugin
from slime_sessions.settings import Settings

__all__ = ["Sessions", "Settings", "add_options", "make_plugin"]
