"""Retries of failed requests at other workers, and circuit breakers for workers that fail too often."""

from slime_retries.breaker import Breaker, Thresholds
from slime_retries.plugin import Retries, add_options, make_plugin
from slime_retries.settings import Settings

__all__ = ["Breaker", "Retries", "Settings", "Thresholds", "add_options", "make_plugin"]
