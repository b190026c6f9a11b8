"""The faults are what they are called: seen by a client that stands where the router does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from chaos.relay import Relay, Trouble
from core.servers import Wire, answer, dial, scripted
from deadlines import HANG_S
from ports import free_port

_BODY = b'{"rid":"a","text":"Hello"}'
_ASKED = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)


async def _engine(wire: Wire) -> None:
    while await wire.request() is not None:
        await wire.send(answer(b'{"text":"engine"}'))


@asynccontextmanager
async def _relayed() -> AsyncIterator[tuple[Relay, str]]:
    async with scripted(_engine) as engine, anyio.create_task_group() as tasks:
        relay = Relay(free_port(), int(engine.url.rpartition(":")[2]))
        await tasks.start(relay.run)
        yield relay, f"http://127.0.0.1:{relay.port}"
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("trouble", "told", "failure"),
    [
        (None, b'{"text":"engine"}', None),
        ("slow", b'{"text":"engine"}', None),
        ("no HTTP", None, httpx.RemoteProtocolError),
        ("bad JSON", b'{"text":"Once upon', None),
        ("short body", None, httpx.RemoteProtocolError),
        ("FIN after request", None, httpx.RemoteProtocolError),
        ("FIN in answer", None, httpx.RemoteProtocolError),
        ("reset after request", None, httpx.ReadError),
        ("reset in answer", None, httpx.ReadError),
        ("silence", None, httpx.ReadTimeout),
    ],
)
async def test_a_trouble_happens_to_the_request_that_comes_while_it_is_set(
    trouble: Trouble | None, told: bytes | None, failure: type[Exception] | None
) -> None:
    async with _relayed() as (relay, url), httpx.AsyncClient(trust_env=False, timeout=2) as client:
        relay.trouble = trouble
        if failure is not None:
            with pytest.raises(failure):
                await client.post(f"{url}/generate", content=_BODY)
        else:
            assert (await client.post(f"{url}/generate", content=_BODY)).content == told
        assert relay.hit == ({"a": trouble} if trouble is not None else {})
        relay.trouble = None
        assert (await client.post(f"{url}/generate", content=_BODY)).content == b'{"text":"engine"}'


@pytest.mark.anyio
async def test_a_forged_answer_follows_the_engines_own_on_the_same_connection() -> None:
    async with _relayed() as (relay, url):
        relay.trouble = "forged answer"
        with await dial(url) as raw:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(raw, _ASKED)
            said = b""
            with anyio.fail_after(HANG_S):
                while b"FORGED" not in said:
                    said += await loop.sock_recv(raw, 1 << 16)
        assert said.startswith(answer(b'{"text":"engine"}'))
        assert said.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.anyio
async def test_probes_are_spared_unless_everything_is_meant() -> None:
    async with _relayed() as (relay, url), httpx.AsyncClient(trust_env=False, timeout=2) as client:
        relay.trouble = "no HTTP"
        assert (await client.get(f"{url}/elsewhere")).is_success
        relay.everything = True
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"{url}/elsewhere")
