"""A library below the core: HTTP/1.1 with clients and with workers. It imports neither core nor plugins."""

import sys

# httpx imports its command line where click, rich and Pygments are installed. That would take a quarter of the time in
# which the router is imported. With this entry httpx takes them for missing; only ``httpx.main`` needs them.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
