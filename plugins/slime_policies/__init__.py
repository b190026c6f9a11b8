"""Who gets the request: ``--policy least_inflight|round_robin|random|power_of_two|cache_aware|manual``."""

from slime_policies.cache_aware import CacheAware
from slime_policies.least_inflight import LeastInflight
from slime_policies.manual import Manual
from slime_policies.plugin import add_options, make_plugin
from slime_policies.policy import Policy, Remembering
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin
from slime_policies.settings import Settings

__all__ = [
    "CacheAware",
    "LeastInflight",
    "Manual",
    "Policy",
    "PowerOfTwo",
    "RandomChoice",
    "Remembering",
    "RoundRobin",
    "Settings",
    "add_options",
    "make_plugin",
]
