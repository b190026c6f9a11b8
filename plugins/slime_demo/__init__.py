"""Shows exact rollouts on one machine, checked token by token against the engines' journals."""

from slime_demo.command import main

__all__ = ["main"]
