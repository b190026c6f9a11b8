"""Generations beyond the limit wait in line, on real sockets; and no slot is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx
import pytest

from core.servers import Wire, answer, dial, on_both_loops, scripted
from openai_.chat.chatting import chatting
from plugged import routing, until
from router_core import Reply, hookimpl
from router_core.cli import build
from router_core.exchange import Exchange
from router_core.request import Request
from routers import BARE, Start
from slime_control import Control
from slime_control import Settings as ControlSettings
from slime_limits import Limits, RefilledSlots, Settings
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]

GENERATE = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


class HoldingWorker:
    """A worker that answers a request when it is let go, by what stands in its body."""

    def __init__(self) -> None:
        self.arrived: list[bytes] = []
        self.under_way = self.most = 0
        self._go: dict[bytes, asyncio.Event] = {}

    def let_go(self, name: bytes) -> None:
        self._go.setdefault(name, asyncio.Event()).set()

    async def __call__(self, wire: Wire) -> None:
        while request := await wire.request():
            name = request.body
            self.arrived.append(name)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            stream = b"/v1/messages" in request.line
            if stream:
                await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            with anyio.CancelScope() as left:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, wire, left)
                    await self._go.setdefault(name, asyncio.Event()).wait()
                    tasks.cancel_scope.cancel()
            self.under_way -= 1
            if left.cancelled_caught:
                return
            await wire.send(b"0\r\n\r\n" if stream else answer(name))

    @staticmethod
    async def _watch(wire: Wire, left: anyio.CancelScope) -> None:
        await wire.until_closed()
        left.cancel()


def limits(
    limit: int, *, queue_size: int = 100, queue_timeout_s: float = 60.0, refill_per_s: int = 0
) -> Limits:
    return Limits(Settings(limit, queue_size, queue_timeout_s, refill_per_s), limit)


@asynccontextmanager
async def limited(plugin: Limits, **others: object) -> AsyncIterator[tuple[Running, HoldingWorker]]:
    """A router with ``plugin`` before a patient worker. At the end nobody may hold a slot or wait."""
    worker = HoldingWorker()
    async with scripted(worker) as served, routing({"limits": plugin, **others}) as running:
        await running.router.add_worker(served.url)
        yield running, worker
        await until(lambda: (plugin.slots.held, plugin.slots.waiting) == (0, 0))


async def test_requests_beyond_the_limit_proceed_in_order_of_arrival() -> None:
    plugin = limits(2)
    names = [b"%d" % number for number in range(8)]
    answers: list[bytes] = []
    async with limited(plugin) as (running, worker), anyio.create_task_group() as tasks:

        async def ask(name: bytes) -> None:
            answers.append((await running.client.post("/generate?a=b", content=name)).content)

        async def answered(name: bytes) -> None:
            await until(lambda: name in answers)

        for count, name in enumerate(names, 1):
            tasks.start_soon(ask, name)
            await come(running, count)
        assert worker.arrived == names[:2]
        for name in names:
            worker.let_go(name)
            await answered(name)
    assert worker.arrived == answers == names
    assert worker.most == 2


async def test_longest_waiting_generation_gets_the_free_slot() -> None:
    plugin = Limits(Settings(1, queue_policy="lof"), 1)
    bodies = {
        length: b'{"text": "a", "sampling_params": {"max_new_tokens": %d}}' % length
        for length in (1, 50, 7, 300)
    }
    async with limited(plugin) as (running, worker), anyio.create_task_group() as tasks:

        async def ask(body: bytes) -> None:
            await running.client.post("/generate", content=body)

        for count, body in enumerate(bodies.values()):
            tasks.start_soon(ask, body)
            await until(lambda: (plugin.slots.held, plugin.slots.waiting) == (1, count))  # noqa: B023
        for count, length in enumerate((1, 300, 50, 7), 1):
            await until(lambda: len(worker.arrived) == count)  # noqa: B023
            worker.let_go(bodies[length])
    assert worker.arrived == [bodies[length] for length in (1, 300, 50, 7)]


async def test_a_full_line_is_a_429_that_says_to_come_again() -> None:
    async with limited(limits(1, queue_size=1)) as (running, worker), anyio.create_task_group() as tasks:
        for name in (b"a", b"b"):
            tasks.start_soon(post, running, name)
        await until(lambda: slots_of(running) == (1, 1))
        refused = await running.client.post("/v1/completions", content=b"c")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "QUEUE_FULL"
        assert refused.headers["retry-after"] == "1"
        # Requests that generate nothing pass.
        assert (await running.client.get("/health")).status_code == 200
        worker.let_go(b"")
        assert (await running.client.get("/get_server_info")).status_code == 200
        for name in (b"a", b"b"):
            worker.let_go(name)
    assert b"c" not in worker.arrived


async def test_without_a_line_whoever_finds_no_slot_is_refused_at_once() -> None:
    async with limited(limits(1, queue_size=0)) as (running, worker), anyio.create_task_group() as tasks:
        tasks.start_soon(post, running, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        assert (await running.client.post("/generate", content=b"b")).status_code == 429
        worker.let_go(b"a")


async def test_request_queued_too_long_gets_a_408_and_leaves_the_queue() -> None:
    async with limited(limits(1, queue_timeout_s=0.2)) as (running, worker):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, running, b"a")
            await until(lambda: slots_of(running) == (1, 0))
            refused = await running.client.post("/generate", content=b"b")
            assert refused.status_code == 408
            assert refused.json()["error"]["code"] == "QUEUE_TIMEOUT"
            assert slots_of(running) == (1, 0)
            worker.let_go(b"a")
        worker.let_go(b"c")
        assert (await running.client.post("/generate", content=b"c")).content == b"c"


async def test_with_a_rate_more_are_let_in_with_time_though_nobody_leaves() -> None:
    names = [b"%d" % number for number in range(8)]
    async with limited(limits(2, refill_per_s=50)) as (running, worker), anyio.create_task_group() as tasks:
        for count, name in enumerate(names, 1):
            tasks.start_soon(post, running, name)
            await until(lambda: len(worker.arrived) + slots_of(running)[1] == count)  # noqa: B023
        await until(lambda: worker.arrived == names)
        assert worker.under_way == 8
        for name in names:
            worker.let_go(name)


class SettableClock:
    """Stands still until it is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_with_a_rate_the_line_is_as_long_and_as_patient_as_without() -> None:
    clock = SettableClock()
    plugin = limits(1, queue_timeout_s=0.2, refill_per_s=1)
    plugin.slots = RefilledSlots(1, 1, 1, clock)
    async with limited(plugin) as (running, worker):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, running, b"a")
            await until(lambda: slots_of(running) == (1, 0))
            late: list[httpx.Response] = []

            async def wait_in_vain() -> None:
                late.append(await running.client.post("/generate", content=b"b"))

            tasks.start_soon(wait_in_vain)
            await until(lambda: slots_of(running) == (1, 1))
            full = await running.client.post("/generate", content=b"c")
            assert (full.status_code, full.json()["error"]["code"]) == (429, "QUEUE_FULL")
            assert full.headers["retry-after"] == "1"
            await until(lambda: bool(late))
            assert (late[0].status_code, late[0].json()["error"]["code"]) == (408, "QUEUE_TIMEOUT")
            clock.now_s = 1.0
            worker.let_go(b"d")
            assert (await running.client.post("/generate", content=b"d")).content == b"d"  # beside a
            worker.let_go(b"a")
        clock.now_s = 1000.0  # what comes meanwhile runs over: two at once are one too many again
        with pytest.raises(httpx.HTTPStatusError, match="408"):
            async with running.client.stream("POST", "/v1/messages", content=b"e"):
                (await running.client.post("/generate", content=b"f")).raise_for_status()
    assert worker.arrived == [b"a", b"d", b"e"]


async def test_an_abort_ends_who_waits_in_line_and_is_meant() -> None:
    control = Control(ControlSettings())
    async with (
        limited(limits(1), control=control) as (running, worker),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(post, running, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        answers: dict[str, httpx.Response] = {}

        async def ask(rid: str) -> None:
            answers[rid] = await running.client.post("/generate", content=b'{"rid":"%b"}' % rid.encode())

        async def abort(body: bytes) -> None:
            worker.let_go(body)
            await running.client.post("/abort_request", content=body)

        for number, rid in enumerate(("r1", "r2", "other"), start=1):
            tasks.start_soon(ask, rid)
            await come(running, 1 + number)
        await abort(b'{"rid": "nobody"}')
        await abort(b'{"rid": ""}')
        await abort(b"what")
        assert slots_of(running) == (1, 3)
        await abort(b'{"rid": "r"}')
        await until(lambda: set(answers) == {"r1", "r2"})
        assert {answer.status_code for answer in answers.values()} == {400}
        assert answers["r1"].json()["error"]["code"] == "ABORTED"
        assert slots_of(running) == (1, 1)
        await abort(b'{"abort_all": true}')
        await until(lambda: "other" in answers)
        worker.let_go(b"a")
    assert not any(body.startswith(b'{"rid":"') for body in worker.arrived)


async def test_a_client_that_hangs_up_in_line_leaves_it() -> None:
    async with limited(limits(1)) as (running, worker), anyio.create_task_group() as tasks:
        tasks.start_soon(post, running, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        with await dial(running.url) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, GENERATE)
            await until(lambda: slots_of(running) == (1, 1))
        await until(lambda: slots_of(running) == (1, 0))
        worker.let_go(b"a")
    assert worker.arrived == [b"a"]


async def test_a_stream_holds_its_slot_to_its_end_or_until_the_client_leaves() -> None:
    async with limited(limits(1)) as (running, worker):
        for name in (b"to the end", b"half way"):
            async with running.client.stream("POST", "/v1/messages", content=name) as stream:
                pieces = stream.aiter_bytes()
                assert await anext(pieces) == b"one"
                assert slots_of(running) == (1, 0)
                if name == b"to the end":
                    worker.let_go(name)
                    assert [piece async for piece in pieces] == []
            await until(lambda: slots_of(running) == (0, 0))


class FailingPlugin:
    """Fails in the hook that it is told to."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        if self._hook == "pre_request":
            raise RuntimeError("before")
        return Reply.from_json({"answered": True}) if self._hook == "answers" else None

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        if self._hook == "post_response":
            raise RuntimeError("behind")


@pytest.mark.parametrize(("hook", "status"), [("pre_request", 500), ("post_response", 500), ("answers", 200)])
async def test_a_slot_comes_back_whatever_plugins_do(hook: str, status: int) -> None:
    async with limited(limits(1), failing=FailingPlugin(hook)) as (running, worker):
        worker.let_go(b"a")
        for _ in range(3):
            assert (await running.client.post("/generate", content=b"a")).status_code == status


async def test_a_slot_comes_back_when_there_is_no_worker_and_when_it_breaks() -> None:
    async def breaking(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal")

    plugin = limits(1, queue_size=0)
    async with scripted(breaking) as served, routing({"limits": plugin}) as running:
        assert (await running.client.post("/generate", content=b"{}")).status_code == 503
        await running.router.add_worker(served.url)
        for _ in range(3):
            with pytest.raises(httpx.RemoteProtocolError):
                await running.client.post("/generate", content=b"{}")
            await until(lambda: slots_of(running) == (0, 0))


async def test_at_the_stop_who_waits_hears_so_at_once_and_who_is_served_goes_on() -> None:
    answers: dict[bytes, httpx.Response] = {}
    async with limited(limits(1)) as (running, worker), anyio.create_task_group() as tasks:

        async def ask(name: bytes) -> None:
            answers[name] = await running.client.post("/generate", content=name)

        tasks.start_soon(ask, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        for name in (b"b", b"c"):
            tasks.start_soon(ask, name)
        await until(lambda: slots_of(running) == (1, 2))
        running.router.stop()
        await until(lambda: set(answers) == {b"b", b"c"})
        late = await running.client.post("/generate", content=b"d")
        for refused in (answers[b"b"], answers[b"c"], late):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "SHUTTING_DOWN"
        worker.let_go(b"a")
    assert answers[b"a"].content == b"a"
    assert worker.arrived == [b"a"]


@pytest.mark.parametrize("when", ["before its turn", "in the moment of its turn", "after its turn"])
async def test_a_slot_that_meets_a_cancellation_goes_to_the_next_in_line(when: str) -> None:
    plugin = limits(1)
    let_in: list[str] = []

    async def generate(name: str) -> None:
        with Exchange(Request("POST", b"/generate", [])) as exchange:
            await plugin.pre_request(exchange)
            let_in.append(name)
            if name == "second" and when == "after its turn":
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        second: list[asyncio.Task[object]] = []

        async def cancelled() -> None:
            """As the watch over clients does it, which does not look whether the task is about to run."""
            task = asyncio.current_task()
            assert task is not None
            second.append(task)
            with suppress(asyncio.CancelledError):
                await generate("second")
            task.uncancel()

        with Exchange(Request("POST", b"/generate", [])) as first:
            await plugin.pre_request(first)
            tasks.start_soon(cancelled)
            await until(lambda: plugin.slots.waiting == 1)
            tasks.start_soon(generate, "third")
            await until(lambda: plugin.slots.waiting == 2)
            if when == "before its turn":
                second[0].cancel()
                await until(lambda: plugin.slots.waiting == 1)
        if when == "after its turn":
            await until(lambda: let_in == ["second"])
        second[0].cancel()  # in the moment: the second one has its slot, and has not run since
    assert let_in == (["second", "third"] if when == "after its turn" else ["third"])
    assert (plugin.slots.held, plugin.slots.waiting) == (0, 0)


async def test_a_timeout_in_the_moment_of_its_turn_does_not_lose_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline passes while the loop is busy, and the slot comes in the same turn of the loop."""
    plugin = limits(1, queue_timeout_s=0.05)
    outcome: list[str] = []

    async def generate() -> None:
        with Exchange(Request("POST", b"/generate", [])) as exchange:
            await plugin.pre_request(exchange)
            outcome.append("let in")

    async with anyio.create_task_group() as tasks:
        with Exchange(Request("POST", b"/generate", [])) as first:
            await plugin.pre_request(first)
            tasks.start_soon(generate)
            await until(lambda: plugin.slots.waiting == 1)
            until_s = asyncio.get_running_loop().time() + 0.1
            while asyncio.get_running_loop().time() < until_s:
                pass  # nothing of the loop runs: neither timer nor task
    assert outcome == ["let in"]
    assert (plugin.slots.held, plugin.slots.waiting) == (0, 0)


async def test_slots_stay_exact_when_many_clients_disconnect_anywhere() -> None:
    rng = random.Random(7)
    plugin = limits(3, queue_size=20)
    answered: list[bytes] = []
    async with limited(plugin) as (running, worker):
        worker.let_go(b"{}")

        async def client() -> None:
            await anyio.sleep(rng.uniform(0, 0.5))
            with await dial(running.url) as raw:
                await asyncio.get_running_loop().sock_sendall(raw, GENERATE)
                with anyio.move_on_after(rng.choice([0.0, 0.005, 0.06, 0.1, 5])):
                    answered.append(await asyncio.get_running_loop().sock_recv(raw, 12))

        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(client)
        await until(lambda: slots_of(running) == (0, 0))
        assert (await running.client.post("/generate", content=b"{}")).content == b"{}"
    assert worker.most <= 3
    assert b"HTTP/1.1 200" in answered


async def test_a_chat_is_counted_once_and_does_not_wait_for_itself(start: Start) -> None:
    flags = ("--plugin", "limits", "--max-concurrent-requests", "1", "--queue-timeout-secs", "5")
    messages = [{"role": "user", "content": "Hi"}]
    async with chatting(start, "hello", flags=flags) as chat:
        plugin = plugin_of(chat.running)
        for _ in range(2):
            said = await chat.post(messages=messages)
            assert said["choices"][0]["message"]["content"] == "hello"
            assert await chat.streamed(messages=messages)
            await until(lambda: (plugin.slots.held, plugin.slots.waiting) == (0, 0))
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask_chat, chat.running, messages)
        assert (plugin.slots.held, plugin.slots.waiting) == (0, 0)


async def test_generations_of_plugins_are_counted() -> None:
    async with limited(limits(1, queue_size=0)) as (running, worker), anyio.create_task_group() as tasks:
        tasks.start_soon(post, running, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        with pytest.raises(Exception, match="no slot of 1 is free"):
            async with running.router.generate({"text": "x"}):
                pass
        worker.let_go(b"a")


async def test_without_a_limit_no_request_passes_through_the_plugin(start: Start) -> None:
    worker = HoldingWorker()
    worker.let_go(b"a")
    async with (
        scripted(worker) as served,
        start(*BARE, "--plugin", "limits", "--worker-urls", served.url) as running,
    ):
        assert (await running.client.post("/generate", content=b"a")).content == b"a"
        assert running.router.hooks.pre_request == []


async def post(running: Running, name: bytes) -> None:
    assert (await running.client.post("/generate", content=name)).content == name


async def come(running: Running, count: int) -> None:
    """Return when ``count`` hold a slot or wait."""
    await until(lambda: sum(slots_of(running)) == count)


async def ask_chat(running: Running, messages: list[dict[str, str]]) -> None:
    assert (await running.client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200


def plugin_of(running: Running) -> Limits:
    hooks = dict(running.router.hooks.pre_request)
    plugin = hooks["limits"].__self__  # type: ignore[attr-defined]  # a bound method
    assert isinstance(plugin, Limits)
    return plugin


def slots_of(running: Running) -> tuple[int, int]:
    """Return the number of requests that hold a slot, and of those that wait."""
    slots = plugin_of(running).slots
    return slots.held, slots.waiting


class Remembers:
    """Answers a repeated question from memory."""

    async def pre_request(self, exchange: Exchange) -> Reply | None:
        return Reply(200, [], b"remembered") if exchange.request.body == b"known" else None


class First(Remembers):
    @hookimpl(tryfirst=True)
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        return await super().pre_request(exchange)


class Behind(Remembers):
    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        return await super().pre_request(exchange)


@pytest.mark.parametrize(("kind", "status"), [(First, 200), (Behind, 429)])
async def test_plugin_marked_tryfirst_answers_without_a_slot(kind: type[Remembers], status: int) -> None:
    async with (
        limited(limits(1, queue_size=0), cache=kind()) as (running, worker),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(post, running, b"a")
        await until(lambda: slots_of(running) == (1, 0))
        assert (await running.client.post("/generate", content=b"known")).status_code == status
        worker.let_go(b"a")


async def test_order_of_pre_request_with_the_default_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mark in (("marked", "tryfirst=True"), ("plain", "")):
        source = f"@hookimpl({mark})\ndef pre_request(exchange): ...\n"
        (tmp_path / f"{name}_to_order.py").write_text(f"from router_core import hookimpl\n\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--max-concurrent-requests", "1", "--enable-igw", "--access-log")
    router, _ = build((*flags, "--middleware-paths", "plain_to_order", "marked_to_order"))
    order = ["access_log", "models", "marked_to_order", "limits", "sessions", "plain_to_order", "control"]
    assert [name for name, _ in router.hooks.pre_request] == order
