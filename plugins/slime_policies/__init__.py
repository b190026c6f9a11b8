"""Who gets the request: ``--policy least_inflight|round_robin|random|power_of_two``."""

from slime_policies.least_inflight import LeastInflight
from slime_policies.plugin import add_options, make_plugin
from slime_policies.policy import Policy
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin

__all__ = [
    "LeastInflight",
    "Policy",
    "PowerOfTwo",
    "RandomChoice",
    "RoundRobin",
    "add_options",
    "make_plugin",
]
