"""A library for plugins: generations that survive the aborts of their engines.

One response in as many attempts as it takes, each judged by itself. ``slime_radix_cache`` makes and records them.
"""
