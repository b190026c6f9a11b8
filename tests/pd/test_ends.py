"""A pair that is given up at any step, or fails at both workers at once: everything that had begun ends, once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

import pytest

from holding import add_ready
from pd.stand_ins import DROP, StandIn, between, refusal, said, stream
from plugged import until
from router_core import Exchange, Worker
from router_core.errors import HTTPError
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from router_core.router import Router
from routers import Start
from slime_pd.attempt import Attempt, Pair
from slime_retries.breaker import Thresholds
from slime_retries.breakers import Breakers

pytestmark = pytest.mark.anyio

#: The turns of the event loop after which a request is given up, each once. A good answer takes about 15.
_TURNS = range(60)

MOODS = {
    "both are well": (said(), said()),
    "both stream": (stream({"meta_info": {"weight_version": "1"}}), stream({"meta_info": {}})),
    "the prefill fails": (refusal(500), said()),
    "the decode fails": (said(), refusal(500)),
    "both fail": (refusal(500), refusal(503)),
    "both hang up": (DROP, DROP),
    "what cannot be merged": (said(input_token_logprobs=[]), said()[:-1] + b"!"),
    "a stream with an error": (stream({"error": {}}), stream({"meta_info": {}})),
}


async def given_up(router: Router, turns: int) -> None:
    """A request that is cancelled after so many ``turns`` of the event loop, unless it has ended."""
    loop = asyncio.get_running_loop()
    headers = [(b"content-type", b"application/json")]
    request = Request("POST", b"/generate", headers, b'{"text":"a","rid":"r%d"}' % turns)

    async def ask() -> None:
        with Exchange(request) as exchange, suppress(HTTPError):
            reply = await router.respond(exchange)
            while not (await reply.next_piece())[1]:
                pass

    task = loop.create_task(ask())

    def wait(turns: int) -> None:
        if turns:
            loop.call_soon(wait, turns - 1)
        else:
            task.cancel()

    wait(turns)
    with suppress(asyncio.CancelledError):
        await task


def half_open(breakers: Breakers, *workers: Worker) -> None:
    """Let ``workers`` wait for a probe."""
    for worker in workers:
        breakers.forget(worker)
        breakers.failed(worker, Request("GET", b"/", []), "a test")
        breakers._wait_over(worker)


def waiting_for_probes(breakers: Breakers) -> list[str]:
    return [worker.worker_type for worker, breaker in breakers.troubled.items() if breaker._probe is not None]


@pytest.mark.parametrize("mood", MOODS)
async def test_nothing_is_left_of_a_pair_that_is_given_up_at_any_step(start: Start, mood: str) -> None:
    prefill, decode = (
        StandIn(kind, rest=how) for kind, how in zip(("prefill", "decode"), MOODS[mood], strict=True)
    )
    flags = (
        "--cb-failure-threshold", "1", "--cb-success-threshold", "9", "--cb-timeout-duration-secs", "600",
        "--retry-max-retries", "2",
    )  # fmt: skip
    async with between(start, prefill, decode, flags=flags) as running:
        router = running.router
        breakers: Breakers = router.components.get("breakers")
        for turns in _TURNS:
            half_open(breakers, prefill.worker, decode.worker)
            await given_up(router, turns)
            assert [worker.load for worker in router.pool] == [0, 0], turns
            assert not waiting_for_probes(breakers), turns
            assert not breakers._failing, turns
            await until(lambda: not router.proxy.busy_connections)


class _AtOnce:
    """Both workers answer in the same turn of the event loop, the decode worker first if ``decode_first``."""

    def __init__(self, decode_first: bool, **statuses: int) -> None:
        self._decode_first = decode_first
        self._statuses = statuses
        self._waiting: list[asyncio.Future[None]] = []

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        raise NotImplementedError

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        assert exchange.worker is not None
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        if len(self._waiting) == 2:
            for each in self._waiting[:: -1 if self._decode_first else 1]:
                loop.call_soon(each.set_result, None)
        await waiting
        return Reply(self._statuses[exchange.worker.worker_type], [], b"{}")


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize(("first", "second"), [(500, 500), (500, 503), (503, 400), (400, 503), (400, 400)])
async def test_failure_of_both_counts_at_the_prefill_worker(
    first: int, second: int, decode_first: bool
) -> None:
    pool = WorkerPool(lambda worker, change: None)
    prefill = add_ready(pool, Worker("http://127.0.0.1:1", "prefill"))
    decode = add_ready(pool, Worker("http://127.0.0.1:2", "decode"))
    breakers = Breakers(Thresholds(failures=1, successes=2), pool)
    half_open(breakers, prefill, decode)
    request = Request("POST", b"/generate", [], b'{"text":"a"}')
    with Exchange(request) as exchange:
        pair = Pair(exchange)
        pair.part.lease(prefill)
        exchange.lease(decode)
        breakers.begin(decode, request)
        inner = _AtOnce(decode_first, prefill=first, decode=second)
        reply = await Attempt(inner, breakers, exchange, pair, request).run(request.body)
        assert exchange.worker is (decode if decode_first and second < 500 else prefill)
        breakers.answered(exchange.worker, request, reply)  # as whoever asked does
        reply.close()
    states = [breakers.troubled[worker].state for worker in (prefill, decode)]
    assert states == ["open" if first >= 500 else "half-open", "half-open"]
    assert not waiting_for_probes(breakers)
    assert [worker.load for worker in pool] == [0, 0]
    breakers.close()
