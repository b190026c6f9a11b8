"""Routers in processes of their own, to be killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import httpx

from chaos.processes import Program
from deadlines import HANG_S


@contextmanager
def started(program: Program) -> Iterator[Program]:
    program.start()
    try:
        yield program
    finally:
        program.kill()


async def listening(client: httpx.AsyncClient, program: Program) -> None:
    with anyio.fail_after(HANG_S):
        while True:
            assert not program.ended, program.said()
            with suppress(httpx.TransportError):
                await client.get("/health")
                return
            await anyio.sleep(0.02)
