"""Policies that choose the worker of a request."""

from slime_policies.auto import Auto
from slime_policies.cache_aware import CacheAware
from slime_policies.consistent_hashing import ConsistentHashing
from slime_policies.least_inflight import LeastInflight
from slime_policies.manual import Manual
from slime_policies.plugin import add_options, make_plugin
from slime_policies.policy import Corrected, Policy, Remembering, Selective
from slime_policies.power_of_two import PowerOfTwo
from slime_policies.prefix_hash import PrefixHash
from slime_policies.random_choice import RandomChoice
from slime_policies.round_robin import RoundRobin
from slime_policies.settings import Settings

__all__ = [
    "Auto",
    "CacheAware",
    "ConsistentHashing",
    "Corrected",
    "LeastInflight",
    "Manual",
    "Policy",
    "PowerOfTwo",
    "PrefixHash",
    "RandomChoice",
    "Remembering",
    "RoundRobin",
    "Selective",
    "Settings",
    "add_options",
    "make_plugin",
]
