"""A library for plugins: generations that survive the aborts of their engines.

A response is made in one or more attempts, and each attempt is checked by itself. ``slime_radix_cache`` uses this
library, and records the attempts.
"""
