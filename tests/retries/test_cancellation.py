"""A request that is tried again and cut short at every turn of the event loop leaves nothing behind."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from core.servers import answer, on_both_loops
from holding import withheld
from plugged import until
from retries.moods import DROP, GARBAGE, STREAM_HEAD, Moody, refused, routed
from slime_retries import Thresholds

pytestmark = [pytest.mark.anyio, on_both_loops]

MOST_TURNS = 1500
#: Open after the first failure, half-open a moment later: attempts are probes as often as not.
TOUCHY = Thresholds(failures=1, successes=1, timeout_s=0.0002)


async def test_cut_short_at_every_turn_it_gives_back_what_it_held() -> None:
    one, two = Moody(), Moody()
    async with routed(one, two, breaker=TOUCHY, attempts=100, initial_backoff_ms=0.1) as running:
        router = running.router
        whole = False

        async def run() -> None:
            nonlocal whole
            with router.generation({"text": "Once"}, session="s") as exchange:
                reply = await router.respond(exchange)
                assert await reply.read() == b"well"
            whole = True

        for turns in range(MOST_TURNS):
            whole = False
            one.moods = [refused(503), DROP, STREAM_HEAD]
            two.moods = [GARBAGE, refused(500)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(turns):
                    await checkpoint()
                    if whole:
                        break
                tasks.cancel_scope.cancel()
            assert [worker.in_flight for worker in router.pool] == [0, 0]
            await until(lambda: not router.proxy.busy_connections)
            if whole:
                break
        else:  # other processes keep its packets waiting for longer than these turns take
            await run()
        one.moods, two.moods = [], []
        await until(lambda: not withheld(one.worker) and not withheld(two.worker))  # no probe is stuck
        for _ in range(4):
            assert (await running.client.post("/generate", json={})).content == b"well"


@pytest.mark.parametrize("failure", [refused(503), refused(503)[:-1], DROP], ids=["whole", "half", "broken"])
async def test_between_two_attempts_nothing_is_held(failure: bytes) -> None:
    one = Moody(failure)
    async with routed(one, initial_backoff_ms=500) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(running.client.post, "/generate")
        await until(lambda: len(one.arrived) == 1)
        await until(lambda: not one.worker.in_flight)
        assert not running.router.proxy.busy_connections
        assert len(one.arrived) == 1
        await until(lambda: len(one.arrived) == 2)


async def test_a_reply_that_was_thrown_away_is_not_mixed_up_with_the_next_one() -> None:
    one = Moody(refused(503), answer(b"first"), answer(b"second"))
    async with routed(one) as running:
        assert (await running.client.post("/generate", json={})).content == b"first"
        assert (await running.client.post("/generate", json={})).content == b"second"
