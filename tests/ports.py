"""Ports for servers that are started later, or in another process."""

from __future__ import annotations

import os
import random
from contextlib import suppress

from slime_http.serving import bind

__all__ = ["free_port", "free_ports"]

#: Below the ports that the system gives to clients and for port 0, so that no one else gets a port before its server.
_PORTS = range(18_000, 32_000)
#: The number of ports for one test process. Processes that run side by side rarely have the same ports.
_SHARE = 200
#: Ports of this process that were not given yet. ``SystemRandom`` draws them: Hypothesis seeds the functions of
#: ``random`` in all processes alike.
_left: list[int] = []


def free_port() -> int:
    """Return a port of 127.0.0.1 on which a server can be started, killed and started again.

    A port is given again only after all others of this process.
    """
    for _ in range(_SHARE):
        if not _left:
            first = os.getpid() % (len(_PORTS) // _SHARE) * _SHARE
            _left.extend(random.SystemRandom().sample(_PORTS[first : first + _SHARE], _SHARE))
        port = _left.pop()
        with suppress(OSError), bind("127.0.0.1", port):
            return port
    raise OSError("no free port")


def free_ports(count: int) -> int:
    """Return the first of ``count`` ports with successive numbers. Each was given by :func:`free_port`."""
    taken: set[int] = set()
    while True:
        taken.add(port := free_port())
        for first in range(port - count + 1, port + 1):
            if taken.issuperset(range(first, first + count)):
                return first
