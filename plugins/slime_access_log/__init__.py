"""A line in the log for each request: worker, times, tokens, and whether the tokens are exact."""

from slime_access_log.plugin import AccessLog, add_options, make_plugin

__all__ = ["AccessLog", "add_options", "make_plugin"]
