"""The OpenAPI description of the router's routes, at ``/openapi.json``."""

from slime_openapi.plugin import OpenAPI, make_plugin

__all__ = ["OpenAPI", "make_plugin"]
