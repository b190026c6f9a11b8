"""The timer that looks at deadlines must not meet a connection that is being made."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import uvloop

from deadlines import HANG_S
from slime_http.limits import Limits
from slime_http.upstream import Upstream

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _burst() -> int:
    """Right answers to a thousand requests in bursts of 200, swept once a millisecond."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}", Limits(idle_s=0.004))
    right = 0

    async def one() -> None:
        nonlocal right
        reply = await upstream.request("GET", b"/", [])
        right += await reply.read() == b"ok"

    for _ in range(5):
        with anyio.fail_after(HANG_S):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(200):
                    tasks.create_task(one())
    upstream.close()
    server.close()
    return right


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_was_just_made_is_not_swept_away(loop: type[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(_burst()) == 1000
