"""Prometheus metrics of the router, at ``/metrics``, and with ``--prometheus-port`` also on a port of their own."""

from slime_metrics.plugin import MetricsPlugin, add_options, make_plugin
from slime_metrics.registry import Metrics
from slime_metrics.settings import Settings

__all__ = ["Metrics", "MetricsPlugin", "Settings", "add_options", "make_plugin"]
