"""Retries: which requests, to which worker and when, and the client's reply in the end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import httpx
import orjson
import pytest

from core.servers import Wire, answer, scripted
from holding import ready
from pd.stand_ins import DROP as STAND_IN_DROP
from pd.stand_ins import StandIn
from plugged import until
from retries.moods import DROP, GARBAGE, HANG, STREAM_HEAD, Moody, nobody, refused, routed
from router_core import Exchange, Worker, hookimpl
from router_core.cli import build
from router_core.errors import HTTPError, SettingsError
from router_core.request import Request
from router_core.router import Router
from routers import BARE, Start, answering
from slime_http.serving import serving

pytestmark = pytest.mark.anyio

GENERATE = {"text": "Once", "sampling_params": {"temperature": 0}}


# Retried failures.


async def test_abort_while_the_previous_attempt_ends_ends_the_request(start: Start) -> None:
    worker = StandIn("regular", STAND_IN_DROP)
    worker.abort_takes_s = 0.5
    async with scripted(worker.serve) as server, start("--health-check-interval-secs", "600") as running:
        await running.router.add_worker(server.url)
        (asked,) = running.router.pool
        status: list[int] = []

        async def ask() -> None:
            answer = await running.client.post("/generate", json={**GENERATE, "rid": "mine"})
            status.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(worker.aborted) and not asked.load)
            await until(lambda: bool(asked.load))
            await running.client.post("/abort_request", json={"rid": "mine"})
        assert status == [400]
        assert len(worker.generations) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_elsewhere_and_nowhere_twice_in_a_row(status: int) -> None:
    one, two = Moody(rest=refused(status)), Moody(rest=refused(status))
    async with routed(one, two) as running:
        assert (await running.client.post("/generate", json=GENERATE)).status_code == status
        asked = sorted([(time, "one") for time in one.times] + [(time, "two") for time in two.times])
        assert len(asked) == 5
        assert all(former != latter for (_, former), (_, latter) in pairwise(asked))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 501, 505])
async def test_a_lasting_failure_passes_untouched(status: int) -> None:
    one, two = Moody(rest=refused(status)), Moody(rest=refused(status))
    async with routed(one, two) as running:
        reply = await running.client.post("/generate", json=GENERATE)
        assert (reply.status_code, reply.content) == (status, b'{"no":%d}' % status)
        assert len(one.arrived) + len(two.arrived) == 1


async def test_the_last_reply_is_the_clients_byte_for_byte() -> None:
    last = refused(503, b"X-Twice: 1", b"X-Twice: 2", b"Retry-After: 0")
    async with routed(Moody(*[refused(500)] * 4, last)) as running:
        reply = await running.client.post("/generate", json=GENERATE)
        assert reply.content == b'{"no":503}'
        sent = [(name.lower(), value) for name, value in reply.headers.raw]
        assert [value for name, value in sent if name == b"x-twice"] == [b"1", b"2"]
        assert (b"x-mine", b"yes") in sent
        assert (b"retry-after", b"0") in sent


@pytest.mark.parametrize("failure", [DROP, GARBAGE])
async def test_a_generation_whose_worker_breaks_is_tried_on_another_one(failure: bytes) -> None:
    one, two = Moody(failure, rest=failure), Moody()
    async with routed(one, two) as running:
        replies = [await running.client.post("/generate", json=GENERATE) for _ in range(20)]
        assert [reply.content for reply in replies] == [b"well"] * 20
        assert one.arrived


@pytest.mark.parametrize(
    ("method", "path", "attempts"),
    [
        ("GET", "/some", 2),
        ("HEAD", "/some", 2),
        ("POST", "/v1/chat/completions", 2),
        ("POST", "/tokenize?a=b", 2),
        ("POST", "/load_lora_adapter", 1),
        ("PUT", "/generate", 1),
        ("DELETE", "/some", 1),
    ],
)
@pytest.mark.parametrize("failure", [DROP, refused(503)], ids=["broken", "refused"])
async def test_request_that_may_change_a_worker_is_sent_once(
    method: str, path: str, attempts: int, failure: bytes
) -> None:
    one = Moody(failure)
    async with routed(one) as running:
        reply = await running.client.request(method, path)
        assert len(one.arrived) == attempts
        assert reply.status_code == (200 if attempts == 2 else 502 if failure == DROP else 503)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_request_that_no_worker_got_is_always_retried_elsewhere(method: str) -> None:
    with nobody() as dead:
        async with routed(Moody()) as running:
            worker, _ = await running.router.add_worker(dead)
            ready(running.router.pool, worker)  # it answered once, and died
            for session in range(9):
                reply = await running.client.request(method, "/some", headers={"x-session-id": str(session)})
                assert reply.content == b"well"


async def test_when_every_worker_is_dead_the_answer_is_502() -> None:
    with nobody() as one, nobody() as two:
        async with routed() as running:
            for url in (one, two):
                worker, _ = await running.router.add_worker(url)
                ready(running.router.pool, worker)  # they answered once
            reply = await running.client.post("/generate", json=GENERATE)
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "WORKER_UNREACHABLE")


async def test_a_worker_that_comes_back_between_two_attempts_is_in_time() -> None:
    async with routed(initial_backoff_ms=200) as running, anyio.create_task_group() as tasks:
        replies: list[httpx.Response] = []

        async def ask() -> None:
            replies.append(await running.client.post("/generate", json=GENERATE))

        tasks.start_soon(ask)
        await anyio.sleep(0.05)
        async with serving(answering(b"here")) as url:
            await running.router.add_worker(url)
            await until(lambda: bool(replies))
        assert replies[0].content == b"here"


async def test_without_any_worker_the_answer_is_503_after_the_last_attempt() -> None:
    async with routed(attempts=2) as running:
        reply = await running.client.post("/generate", json=GENERATE)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "NO_WORKER")


async def test_a_worker_that_is_too_slow_is_not_tried_again(start: Start) -> None:
    one = Moody(rest=HANG)
    flags = [*BARE, "--plugin", "retries", "--request-timeout-secs", "0.2"]
    async with scripted(one.serve) as server, start(*flags, "--worker-urls", server.url) as running:
        await until(lambda: running.router.pool.healthy == 1)
        reply = await running.client.post("/generate", json=GENERATE)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "WORKER_TIMEOUT")
        assert len(one.arrived) == 1


@pytest.mark.parametrize("length", [10, 1 << 20])
async def test_a_whole_answer_that_breaks_off_is_asked_for_again(length: int) -> None:
    """Nothing of it was passed on: half an answer is of no use to anybody."""
    whole = answer(b"w" * length)

    async def halves(wire: Wire) -> None:
        while await wire.request():
            if await wire.send(whole if len(one.arrived) > 1 else whole[:-5]) and len(one.arrived) == 1:
                return

    async with scripted(halves) as one, routed() as running:
        await running.router.add_worker(one.url)
        reply = await running.client.post("/generate", json=GENERATE)
        assert (reply.status_code, reply.content) == (200, b"w" * length)
        assert reply.headers["content-length"] == str(length)
        assert len(one.arrived) == 2


@pytest.mark.parametrize(
    "begun", [answer(b"w" * (2 << 20))[:-5], STREAM_HEAD + b"3\r\none\r\n"], ids=["large", "stream"]
)
async def test_an_answer_of_which_something_was_passed_on_is_not_begun_again(begun: bytes) -> None:
    async def breaks_off(wire: Wire) -> None:
        if await wire.request():
            await wire.send(begun)

    async with scripted(breaks_off) as one, routed() as running:
        await running.router.add_worker(one.url)
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.post("/generate", json=GENERATE)
        assert len(one.arrived) == 1


async def test_a_stream_of_which_only_the_head_came_is_asked_for_again() -> None:
    """Engines send the head when they take a request, and the first event when its turn has come."""
    events = b"6\r\none\n\nt\r\n4\r\nwo\n\n\r\n0\r\n\r\n"
    resume = anyio.Event()

    async def dying(wire: Wire) -> None:
        if await wire.request():
            await wire.send(STREAM_HEAD)
            await resume.wait()

    one = Moody(rest=STREAM_HEAD + events)
    async with scripted(dying) as dead, routed(one) as running, anyio.create_task_group() as tasks:
        worker, _ = await running.router.add_worker(dead.url)
        running.router.pool.bind("s", worker)
        streamed: list[bytes] = []

        async def ask() -> None:
            headers = {"x-session-id": "s"}
            async with running.client.stream("POST", "/generate", json=GENERATE, headers=headers) as reply:
                assert reply.headers["content-type"] == "text/event-stream"
                streamed.extend([piece async for piece in reply.aiter_raw()])

        tasks.start_soon(ask)
        await until(lambda: len(dead.arrived) == 1)
        resume.set()
        await until(lambda: b"".join(streamed) == b"one\n\ntwo\n\n")
        assert (len(dead.arrived), len(one.arrived)) == (1, 1)


async def test_a_stream_without_events_ends_as_it_is() -> None:
    one = Moody(rest=STREAM_HEAD + b"0\r\n\r\n")
    async with routed(one) as running:
        reply = await running.client.post("/generate", json=GENERATE)
        assert (reply.status_code, reply.content, len(one.arrived)) == (200, b"", 1)


async def test_the_head_of_a_stream_that_is_no_generation_is_passed_on_at_once() -> None:

    async def silent(wire: Wire) -> None:
        if await wire.request():
            await wire.send(STREAM_HEAD)
            await wire.until_closed()

    async with scripted(silent) as server, routed() as running:
        await running.router.add_worker(server.url)
        async with running.client.stream("POST", "/news", json={}, timeout=2) as reply:
            assert reply.status_code == 200


async def test_a_connection_that_the_worker_closes_as_it_is_used_is_no_failure() -> None:
    """Its keep-alive timer has run out: nobody is to blame, and no breaker counts it."""

    class Listens:
        failures = 0

        @hookimpl
        def attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
            self.failures += 1

    async def leaving(wire: Wire) -> None:
        if await wire.request():
            await wire.send(answer(b"well"))
            await wire.request()  # the next one is not answered

    listens = Listens()
    async with scripted(leaving) as one, routed(plugins={"listens": listens}) as running:
        await running.router.add_worker(one.url)
        replies = [await running.client.post("/shutdown", json={}) for _ in range(6)]
        assert [reply.content for reply in replies] == [b"well"] * 6
        assert len(one.arrived) > 6
        assert listens.failures == 0


# Requests of retries.


async def test_the_body_is_there_each_time() -> None:
    """An earlier design called the next application twice, and the second worker got nothing."""
    body = b'{"text": "\\u00e9",  "n":1.50}' + b" " * 300_000
    one = Moody(refused(503), DROP, GARBAGE)
    async with routed(one) as running:
        reply = await running.client.post("/generate?x=%2F", content=body, headers={"x-one": "1"})
        assert reply.content == b"well"
        assert [request.body for request in one.arrived] == [body] * 4
        assert {request.line for request in one.arrived} == {b"POST /generate?x=%2F HTTP/1.1"}
        assert {tuple(request.values(b"x-one")) for request in one.arrived} == {(b"1",)}


class Editing:
    """Changes the JSON of a request, and asks again while a worker says "again"."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    @hookimpl
    def setup(self, router: Router) -> None:
        self.router = router

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        exchange.request.replace_json({**exchange.request.json(), "added": "é"})

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        while await exchange.reply.read() == b"again":
            exchange.release()
            reply = await self.router.ask_again(exchange, exchange.request)
            self.statuses.append(reply.status)
            if reply.status == 200:
                exchange.reply = reply
            else:
                reply.close()


async def test_an_edited_body_is_the_same_each_time() -> None:
    one = Moody(refused(500), DROP)
    async with routed(one, plugins={"editing": Editing()}) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert [request.body for request in one.arrived] == [orjson.dumps({**GENERATE, "added": "é"})] * 3


async def test_a_plugin_that_asks_again_does_not_multiply_the_attempts() -> None:
    """Four asks that fail are eight requests, not twenty; each of them is made at least once."""
    editing = Editing()
    one = Moody(answer(b"again"), *[refused(503)] * 8)
    async with routed(one, plugins={"editing": editing}) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert editing.statuses == [503, 503, 503, 503, 200]
        assert len(one.arrived) == 1 + 5 + 3 + 1


async def test_a_plugin_that_asks_again_has_all_attempts_for_the_next_failures() -> None:
    editing = Editing()
    one = Moody(refused(503), refused(503), answer(b"again"), *[refused(503)] * 4)
    async with routed(one, plugins={"editing": editing}) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert editing.statuses == [200]


async def test_a_session_moves_to_the_worker_that_answered() -> None:
    one, two = Moody(), Moody()
    async with routed(one, two) as running:
        for _ in range(2):
            await running.client.post("/generate", json=GENERATE, headers={"x-session-id": "s"})
        first, second = (one, two) if one.arrived else (two, one)
        assert (len(first.arrived), len(second.arrived)) == (2, 0)
        first.moods.append(refused(503))
        for _ in range(2):
            await running.client.post("/generate", json=GENERATE, headers={"x-session-id": "s"})
        assert (len(first.arrived), len(second.arrived)) == (3, 2)


# Times of retries.


async def test_the_waits_grow_by_the_factor_up_to_the_limit() -> None:
    one = Moody(rest=refused(503))
    waits: dict[str, Any] = {"initial_backoff_ms": 50, "backoff_multiplier": 10, "max_backoff_ms": 300}
    async with routed(one, attempts=4, jitter=0.1, **waits) as running:
        await running.client.post("/generate", json=GENERATE)
        gaps = [latter - former for former, latter in pairwise(one.times)]
        assert all(gap >= 0.9 * wanted for gap, wanted in zip(gaps, (0.05, 0.3, 0.3), strict=True))
        assert gaps[2] < 4.5  # which it would be without the limit


async def test_retry_after_is_waited_for_when_there_is_no_other_worker() -> None:
    one = Moody(refused(429, b"Retry-After: 1"))
    async with routed(one) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert one.times[1] - one.times[0] >= 0.99


@pytest.mark.parametrize("value", [b"9" * 5000, b"3600"])
async def test_retry_after_is_capped_at_the_longest_wait(value: bytes) -> None:
    one = Moody(refused(503, b"Retry-After: " + value))
    async with routed(one, max_backoff_ms=200) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert 0.19 <= one.times[1] - one.times[0] < 2


@pytest.mark.parametrize("value", [b"soon", b"-1", b"Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_invalid_retry_after_is_ignored(value: bytes) -> None:
    one = Moody(refused(503, b"Retry-After: " + value))
    async with routed(one) as running:
        assert (await running.client.post("/generate", json=GENERATE)).content == b"well"
        assert one.times[1] - one.times[0] < 1


async def test_another_worker_is_asked_at_once_despite_retry_after_of_the_first() -> None:
    one, two = Moody(refused(503, b"Retry-After: 20")), Moody()
    async with routed(one, two) as running:
        running.router.pool.bind("s", one.worker)
        with anyio.fail_after(15):
            reply = await running.client.post("/generate", json=GENERATE, headers={"x-session-id": "s"})
        assert reply.content == b"well"
        assert (len(one.arrived), len(two.arrived)) == (1, 1)


# Disconnected clients.


async def test_a_client_that_leaves_between_two_attempts_ends_them() -> None:
    one = Moody(rest=refused(503))
    async with routed(one, initial_backoff_ms=300) as running:
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/generate", json=GENERATE, timeout=0.1)
        assert one.worker.in_flight == 0
        await anyio.sleep(0.5)
        assert len(one.arrived) == 1


async def test_a_client_that_leaves_before_its_stream_has_begun_ends_it() -> None:
    async def silent(wire: Wire) -> None:
        if await wire.request():
            await wire.send(STREAM_HEAD)
            await wire.until_closed()

    async with scripted(silent) as one, routed() as running:
        await running.router.add_worker(one.url)
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/generate", json=GENERATE, timeout=0.2)
        await until(lambda: not one.open)
        assert len(one.arrived) == 1


async def test_nothing_new_is_begun_for_a_client_that_has_gone() -> None:
    """The worker was told to stop and is given time to say what it has; instead it fails."""
    leave = anyio.Event()

    class Tells:
        @hookimpl
        def client_gone(self) -> bool:
            leave.set()
            return True

    async def failing(wire: Wire) -> None:
        while await wire.request():
            await leave.wait()
            await wire.send(refused(503))

    async with scripted(failing) as one, routed(plugins={"tells": Tells()}) as running:
        await running.router.add_worker(one.url)
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/generate", json=GENERATE, timeout=0.2)
        await until(lambda: leave.is_set() and not any(worker.in_flight for worker in running.router.pool))
        await anyio.sleep(0.1)
        assert len(one.arrived) == 1


# Flags.


async def test_retries_can_be_switched_off(start: Start) -> None:
    one = Moody(rest=refused(503))
    flags = [*BARE, "--plugin", "retries", "--disable-retries"]
    async with scripted(one.serve) as server, start(*flags) as running:
        await running.router.add_worker(server.url)
        assert (await running.client.post("/generate", json=GENERATE)).status_code == 503
        assert len(one.arrived) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--retry-max-retries", "0"],
        ["--retry-initial-backoff-ms", "0"],
        ["--retry-max-backoff-ms", "inf"],
        ["--retry-backoff-multiplier", "0.5"],
        ["--retry-jitter-factor", "1.5"],
        ["--cb-failure-threshold", "0"],
        ["--cb-success-threshold", "0"],
        ["--cb-timeout-duration-secs", "-1"],
        ["--cb-window-duration-secs", "nan"],
    ],
)
def test_flags_that_cannot_work_end_the_start(flags: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"{flags[0]}: wanted"):
        build([*BARE, "--plugin", "retries", *flags])
