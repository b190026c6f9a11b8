"""Sessions for agents that cannot set headers: by path, by body, by API key; their records and samples."""

from slime_sessions.plugin import Sessions, add_options, make_plugin
from slime_sessions.settings import Settings
from slime_sessions.turns import SessionTurns, Turn, TurnContext

__all__ = ["SessionTurns", "Sessions", "Settings", "Turn", "TurnContext", "add_options", "make_plugin"]
