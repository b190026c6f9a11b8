"""The clocks that tests run on do not count what other processes took."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from deadlines import HANG_S
from own_time import OwnTimeLoop, OwnTimeUvloop

on_each_loop = pytest.mark.parametrize("new_loop", [OwnTimeLoop, OwnTimeUvloop], ids=["asyncio", "uvloop"])


@on_each_loop
def test_timer_does_not_expire_while_process_stands_still(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> bool:
        expired = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, expired.set)
        for _ in range(10):
            time.sleep(0.05)  # noqa: ASYNC251  # as if another process had the core
            await asyncio.sleep(0)
        return expired.is_set()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert not runner.run(scenario())


@on_each_loop
def test_timers_expire_in_order_after_no_less_than_their_time(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        began, real = loop.time(), time.monotonic()
        order: list[float] = []
        for delay in (0.03, 0.01, 0.02):
            loop.call_later(delay, order.append, delay)
        loop.call_later(0.015, order.append, 0.015).cancel()
        await asyncio.sleep(0.05)
        assert 0.05 <= loop.time() - began <= time.monotonic() - real + 0.001
        return order

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(scenario()) == [0.01, 0.02, 0.03]


@on_each_loop
def test_timer_expires_in_a_loop_that_never_waits(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        expired = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, expired.set)
        while not expired.is_set():  # noqa: ASYNC110  # the loop must not wait
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


def test_connection_accepted_as_server_closes_is_closed() -> None:
    async def scenario() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as raw:
            raw.setblocking(False)
            for _ in range(2):
                await asyncio.sleep(0)  # accepted, but no transport is made yet
            server.close()
            return await asyncio.wait_for(loop.sock_recv(raw, 1), HANG_S)

    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        assert runner.run(scenario()) == b""
