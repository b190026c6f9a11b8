"""Breakers before workers on real sockets: when they open, who probes, and what closes them."""

from __future__ import annotations

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from holding import quarantine, ready, withheld
from plugged import until
from retries.moods import DROP, HANG, STREAM_HEAD, Moody, nobody, refused, routed
from router_core import Worker
from slime_retries import Thresholds
from slime_retries.breaker import State
from slime_testing import Running

pytestmark = pytest.mark.anyio

#: Opens for good, as far as a test is concerned.
LONG = Thresholds(failures=2, successes=2, timeout_s=600)
SHORT = Thresholds(failures=2, successes=2, timeout_s=0.4)
BEGINNING = STREAM_HEAD + b"3\r\none\r\n"
END = b"3\r\ntwo\r\n0\r\n\r\n"


async def ask(running: Running, path: str = "/generate") -> int:
    return (await running.client.post(path, json={})).status_code


async def test_failures_in_a_row_open_it_and_nobody_is_sent_there_any_more() -> None:
    bad, good = Moody(rest=refused(500)), Moody()
    async with routed(bad, good, breaker=LONG) as running:
        assert [await ask(running) for _ in range(40)] == [200] * 40
        assert len(bad.arrived) == 2
        shown = (await running.client.get("/workers")).json()["workers"]
        assert [(one["is_healthy"], one["state"], one["reason"]) for one in shown] == [
            (False, "ready", "circuit breaker open"),
            (True, "ready", None),
        ]


async def test_an_answer_in_between_starts_the_row_anew() -> None:
    one = Moody(*[refused(500), answer(b"well")] * 5)
    async with routed(one, breaker=LONG, attempts=1) as running:
        assert [await ask(running) for _ in range(10)] == [500, 200] * 5
        assert not withheld(one.worker)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422, 429])
async def test_a_status_of_4xx_is_no_failure(status: int) -> None:
    one = Moody(*[refused(status)] * 10)
    async with routed(one, breaker=LONG, attempts=1) as running:
        assert [await ask(running) for _ in range(10)] == [status] * 10
        assert not withheld(one.worker)


@pytest.mark.parametrize("failure", [DROP, refused(503), refused(599)])
async def test_each_attempt_is_counted_once(failure: bytes) -> None:
    one = Moody(rest=failure)
    async with routed(one, breaker=Thresholds(failures=3), attempts=1) as running:
        for _ in range(2):
            await ask(running)
        assert not withheld(one.worker)
        await ask(running)
        assert withheld(one.worker)


async def test_a_failure_that_is_told_and_then_breaks_off_is_one() -> None:
    async def failing(wire: Wire) -> None:
        if await wire.request():
            await wire.send(refused(500)[:-1])

    async with scripted(failing) as server, routed(breaker=LONG, attempts=1) as running:
        worker, _ = await running.router.add_worker(server.url)
        for expected in (False, True):
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(running)
            assert withheld(worker) == expected


async def test_workers_that_refuse_connections_are_left_alone() -> None:
    with nobody() as dead:
        async with routed(Moody(), breaker=LONG) as running:
            worker, _ = await running.router.add_worker(dead)
            ready(running.router.pool, worker)
            assert [await ask(running) for _ in range(40)] == [200] * 40
            assert withheld(worker)


async def test_a_worker_that_is_not_up_yet_is_not_counted_against() -> None:
    with nobody() as late:
        async with routed(breaker=LONG) as running:
            worker, _ = await running.router.add_worker(late)
            assert await ask(running) == 503
            assert (worker.state, withheld(worker)) == ("joining", False)


async def test_answers_that_break_in_their_middle_open_it() -> None:
    async def breaking(wire: Wire) -> None:
        if await wire.request():
            await wire.send(BEGINNING)

    async with scripted(breaking) as server, routed(breaker=LONG) as running:
        worker, _ = await running.router.add_worker(server.url)
        for expected in (False, True):
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(running)
            assert withheld(worker) == expected


async def test_streams_that_end_well_start_the_row_anew() -> None:
    one = Moody(*[refused(500), BEGINNING + END] * 3)
    async with routed(one, breaker=LONG, attempts=1) as running:
        assert [await ask(running) for _ in range(6)] == [500, 200] * 3
        assert not withheld(one.worker)


async def test_breakers_can_be_switched_off() -> None:
    one = Moody(rest=refused(500))
    async with routed(one, breaker=None, attempts=1) as running:
        assert [await ask(running) for _ in range(30)] == [500] * 30
        assert len(one.arrived) == 30


# Half-open.


async def open_it(running: Running, one: Moody) -> None:
    for _ in range(SHORT.failures):
        await ask(running)
    assert withheld(one.worker)
    await until(lambda: not withheld(one.worker))  # the time is over


def state_of(running: Running, worker: Worker) -> State:
    """Of its breaker."""
    state: State = running.router.components.get("breakers").troubled[worker].state
    return state


async def test_only_worker_gets_nothing_while_its_breaker_is_open() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await ask(running)
        await ask(running)
        assert [await ask(running) for _ in range(3)] == [503] * 3
        assert len(one.arrived) == 2
        await until(lambda: not withheld(one.worker))
        assert [await ask(running) for _ in range(10)] == [200] * 10
        assert one.worker.reason is None


async def test_requests_that_wait_for_a_probe_are_answered_when_it_succeeds() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=SHORT, initial_backoff_ms=100) as running:
        assert await ask(running) == 200  # two failures, no worker, a probe


async def test_half_open_one_request_at_a_time_is_let_through() -> None:
    begin, busiest, busy = anyio.Event(), 0, 0

    async def serve(wire: Wire) -> None:
        nonlocal busiest, busy
        while request := await wire.request():
            if request.body == b"bad":
                await wire.send(refused(500))
                continue
            busy += 1
            busiest = max(busiest, busy)
            await begin.wait()
            busy -= 1
            await wire.send(answer(b"well"))

    statuses: list[int] = []
    async with scripted(serve) as server, routed(breaker=SHORT, attempts=1) as running:
        worker, _ = await running.router.add_worker(server.url)
        for _ in range(2):
            await running.client.post("/generate", content=b"bad")
        await until(lambda: not withheld(worker))

        async def asks() -> None:
            statuses.append(await ask(running))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(asks)
            await until(lambda: len(statuses) == 7)
            assert statuses == [503] * 7
            assert withheld(worker)
            begin.set()
        assert (statuses[-1], busiest) == (200, 1)
        assert state_of(running, worker) == "half-open"
        assert await ask(running) == 200
        assert worker.reason is None


async def test_a_probe_that_fails_opens_it_again() -> None:
    one = Moody(*[refused(500)] * 2, answer(b"well"), refused(500))
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await open_it(running, one)
        assert [await ask(running) for _ in range(3)] == [200, 500, 503]
        assert one.worker.reason == "circuit breaker open"
        await until(lambda: not withheld(one.worker))
        assert [await ask(running) for _ in range(3)] == [200] * 3


async def test_a_stream_is_a_probe_until_it_ends() -> None:
    one = Moody(*[refused(500)] * 2, BEGINNING)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await open_it(running, one)
        async with running.client.stream("POST", "/generate", json={}) as reply:
            assert reply.status_code == 200
            assert await ask(running) == 503
        await until(lambda: not withheld(one.worker))  # its client has left
        assert state_of(running, one.worker) == "half-open"


async def test_a_probe_whose_client_leaves_decides_nothing() -> None:
    one = Moody(*[refused(500)] * 2, HANG)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await open_it(running, one)
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/generate", json={}, timeout=0.2)
        await until(lambda: not withheld(one.worker))
        assert state_of(running, one.worker) == "half-open"
        assert [await ask(running) for _ in range(2)] == [200, 200]
        assert one.worker.reason is None


async def test_a_probe_that_cannot_be_sent_decides_nothing() -> None:
    """A header that a plugin made, say, is found to have a line break when the request is written."""
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await open_it(running, one)
        with running.router.generation({}) as exchange:
            exchange.request.headers.append((b"x-broken", b"a\r\nb"))
            with pytest.raises(Exception, match="line break"):
                await running.router.respond(exchange)
        assert not withheld(one.worker)
        assert [await ask(running) for _ in range(2)] == [200, 200]


async def test_a_refusal_that_is_thrown_away_is_a_success_as_well() -> None:
    one = Moody(*[refused(500)] * 2, *[refused(429)] * 2)
    async with routed(one, breaker=SHORT, attempts=2) as running:
        await open_it(running, one)
        assert await ask(running) == 429
        assert one.worker.reason is None


async def test_an_answer_that_a_plugin_reads_is_a_success() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        await open_it(running, one)
        for _ in range(2):
            async with running.router.generate({"text": "Once"}) as reply:
                assert await reply.read() == b"well"
        assert one.worker.reason is None


# Starting afresh.


async def test_registering_a_worker_again_closes_it() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=LONG, attempts=1) as running:
        for _ in range(2):
            await ask(running)
        await running.client.post("/add_worker", json={"url": one.worker.url})
        assert await ask(running) == 200
        assert one.worker.reason is None


async def test_a_worker_that_its_probes_find_well_again_starts_afresh() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=LONG, attempts=1) as running:
        for _ in range(2):
            await ask(running)
        quarantine(running.router.pool, one.worker, "no answer")
        assert one.worker.reason == "no answer"
        ready(running.router.pool, one.worker)
        assert await ask(running) == 200


async def test_a_worker_that_left_is_forgotten_whatever_it_still_does() -> None:
    touchy = Thresholds(failures=1, timeout_s=SHORT.timeout_s)
    one = Moody(refused(500), HANG)
    async with routed(one, breaker=touchy, attempts=1) as running, anyio.create_task_group() as tasks:
        await open_it(running, one)
        tasks.start_soon(ask, running)
        await until(lambda: len(one.arrived) == 2)
        running.router.pool.remove(one.worker)
        running.router.proxy.close()  # which breaks the probe
        await until(lambda: not one.worker.in_flight)
        assert not running.router.components.get("breakers").troubled


async def test_a_worker_that_is_quarantined_as_well_keeps_the_reason_for_that() -> None:
    one = Moody(*[refused(500)] * 2)
    async with routed(one, breaker=SHORT, attempts=1) as running:
        for _ in range(2):
            await ask(running)
        quarantine(running.router.pool, one.worker, "no answer")
        await until(lambda: not withheld(one.worker))
        assert one.worker.reason == "no answer"


async def test_a_router_ends_while_a_breaker_is_open() -> None:
    one = Moody(rest=refused(500))
    async with routed(one, breaker=LONG, attempts=2) as running:
        await ask(running)
        assert withheld(one.worker)
    assert not withheld(one.worker)  # nor is a timer left
