"""``slime-router top``: the fleet at a terminal, from the router's HTTP routes."""

from slime_top.command import main

__all__ = ["main"]
