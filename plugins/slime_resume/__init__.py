"""A library for plugins: generations that survive the aborts of their engines.

A response is made in one or more attempts, each checked by itself. ``slime_radix_cache`` uses this, and records them.
"""
