"""Several routers in one process and one event loop.

    python -m benchmarks.several_routers FLAGS --next FLAGS --next FLAGS

The memory of two processes is placed differently, which alone changes the processor time of a request by some percent.
Routers in one process share the interpreter, the code of all modules and the event loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import anyio
import uvloop

from router_core.cli import build
from slime_http.memory import tune_gc
from slime_http.serving import serving

__all__ = ["NEXT", "command"]

NEXT = "--next"


def command(routers: Sequence[Sequence[str]]) -> list[str]:
    """Return the command that runs one router for each item of ``routers``: its flags, ``--port`` among them."""
    flags = [flag for each in routers for flag in (NEXT, *each)]
    return [sys.executable, "-m", "benchmarks.several_routers", *flags[1:]]


def _each(flags: Sequence[str]) -> Iterator[list[str]]:
    found: list[str] = []
    for flag in flags:
        if flag == NEXT:
            yield found
            found = []
        else:
            found.append(flag)
    yield found


async def _main(flags: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        for each in _each(flags):
            router, app = build(each)
            settings = router.settings
            await stack.enter_async_context(
                serving(app, host=settings.host, port=settings.port, on_stop=router.stop)
            )
        await anyio.sleep_forever()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    tune_gc()
    anyio.run(_main, sys.argv[1:], backend_options={"loop_factory": uvloop.new_event_loop})
