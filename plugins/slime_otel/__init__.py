"""Traces of requests in OpenTelemetry's format, with its conventions for generative AI."""

from slime_otel.plugin import add_options, make_plugin

__all__ = ["add_options", "make_plugin"]
