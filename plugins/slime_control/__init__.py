"""Calls to all engines at once: pause, continue, abort, flush the caches, update weights, release memory, profile."""

from slime_control.plugin import Control, add_options, make_plugin
from slime_control.settings import Settings

__all__ = ["Control", "Settings", "add_options", "make_plugin"]
