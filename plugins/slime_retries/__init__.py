"""A request that a worker fails is tried on another one; a worker that fails too often gets no requests for a while."""

from slime_retries.breaker import Breaker, Thresholds
from slime_retries.plugin import Retries, add_options, make_plugin
from slime_retries.settings import Settings

__all__ = ["Breaker", "Retries", "Settings", "Thresholds", "add_options", "make_plugin"]
