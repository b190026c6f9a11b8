"""Admission control: a limit of concurrent generations, and a queue for the requests beyond it."""

from slime_limits.plugin import Limits, add_options, make_plugin
from slime_limits.queues import FirstCome, LongestFirst, Queue, Rank, rank_of
from slime_limits.settings import Settings
from slime_limits.slots import Place, QueueFull, RefilledSlots, Slots

__all__ = [
    "FirstCome",
    "Limits",
    "LongestFirst",
    "Place",
    "Queue",
    "QueueFull",
    "Rank",
    "RefilledSlots",
    "Settings",
    "Slots",
    "add_options",
    "make_plugin",
    "rank_of",
]
