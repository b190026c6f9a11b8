"""How many may generate at once, and how many may wait for it."""

from slime_limits.plugin import Limits, add_options, make_plugin
from slime_limits.settings import Settings
from slime_limits.slots import Place, QueueFull, Slots

__all__ = ["Limits", "Place", "QueueFull", "Settings", "Slots", "add_options", "make_plugin"]
