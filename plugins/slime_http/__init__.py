"""A library below the core: HTTP/1.1 with clients and with workers. It imports neither core nor plugins."""

import sys

# If click, rich and Pygments are installed, httpx imports its command line. This would take a quarter of the time that
# the router's import takes. With this entry httpx behaves as if the three were missing; only ``httpx.main`` needs them.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
