"""Sessions for agents that cannot set headers: by path, by body, by API key; their records and samples."""

from slime_sessions.plugin import Sessions, add_options, make_plugin
from slime_sessions.settings import Settings

__all__ = ["Sessions", "Settings", "add_options", "make_plugin"]
