"""The fleet's version follows what workers say in their answers, and generation goes on meanwhile."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import pytest

from deadlines import HANG_S
from health.naming import Naming
from health.patient import Changes, until
from holding import drain, stale, tear
from plugged import routing
from ports import free_port
from router_core import Exchange, WeightUpdate, Worker, hookimpl
from routers import Start
from slime_control import Control
from slime_control import Settings as ControlSettings
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings as EngineSettings
from slime_health import Health, Settings
from slime_health.watch import UNCHECKED
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

#: Probes so rare that everything is learnt from answers: the first one comes at any time within the interval.
RARE = Settings(interval_s=1e6, timeout_s=1)
QUICK = Settings(interval_s=0.02, timeout_s=1, lag_s=0.3)
#: Quick, and no number of failures is enough for a quarantine.
LENIENT = Settings(interval_s=0.1, timeout_s=60, failure_threshold=1000)


class Moves:
    """A plugin that keeps the fleet's moves: the version, and who told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self.seen.append((update.version, update.source))


class VersionedFleet:
    """A router before engines, and what it told."""

    def __init__(self, running: Running, engines: tuple[Naming, ...], moves: Moves, changes: Changes) -> None:
        self.router, self.client = running.router, running.client
        self.engines, self.moves, self.changes = engines, moves, changes

    @property
    def version(self) -> str | None:
        return self.router.weights.current

    def worker(self, engine: Naming) -> Worker:
        return self.router.pool.find(engine.url)

    @property
    def states(self) -> list[str]:
        return [self.worker(engine).state for engine in self.engines]

    @property
    def shown(self) -> set[tuple[str, str | None]]:
        return {(worker.state, worker.weight_version) for worker in map(self.worker, self.engines)}

    async def generate(self, **more: Any) -> httpx.Response:
        return await self.client.post("/generate", json={"text": "Hi", **more})

    async def break_off(self) -> None:
        """Ask for a stream, and read it until it ends or breaks off."""
        with suppress(httpx.RemoteProtocolError):
            await self.generate(stream=True)

    async def break_at(self, engine: Naming) -> None:
        """Let ``engine`` break off an answer while all other engines serve."""
        others = [worker for worker in self.router.pool if worker is not self.worker(engine)]
        for worker in others:
            self.router.pool.hold(worker, "test", "the request is for another one")
        engine.breaking = anyio.Event()
        async with self.client.stream("POST", "/generate", json={"text": "Hi", "stream": True}) as answer:
            for worker in others:
                self.router.pool.release(worker, "test")
            engine.breaking.set()
            with suppress(httpx.RemoteProtocolError):
                await answer.aread()
        engine.breaking = None
        assert UNCHECKED in self.worker(engine).holds

    async def hear(self, engine: Naming, **more: Any) -> None:
        """Let ``engine`` answer something."""
        before = len(engine.asked)
        with anyio.fail_after(HANG_S):
            while len(engine.asked) == before:
                assert (await self.generate(**more)).status_code == 200

    async def questions_are_settled(self) -> None:
        """Return when no engine was asked anything for a while."""
        asked = -1
        while asked != sum(engine.questions for engine in self.engines):
            asked = sum(engine.questions for engine in self.engines)
            await anyio.sleep(0.4)


@asynccontextmanager
async def fleet(
    *engines: Naming, settings: Settings = RARE, beside: Mapping[str, object] | None = None
) -> AsyncIterator[VersionedFleet]:
    moves, changes = Moves(), Changes()
    plugins = {
        "health": Health(settings),
        "control": Control(ControlSettings(5.0, 5.0)),
        "moves": moves,
        "changes": changes,
        **(beside or {}),
    }
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.url = await stack.enter_async_context(serving(engine.app, grace_s=0.1))
        running = await stack.enter_async_context(routing(plugins))
        for engine in engines:
            await running.router.add_worker(engine.url)
        yield VersionedFleet(running, engines, moves, changes)


# the fleet


@pytest.mark.parametrize(
    "body", [{}, {"stream": True}, {"text": ["a", "b"]}], ids=["whole", "streamed", "batch"]
)
async def test_fleet_version_follows_answers(body: dict[str, Any]) -> None:
    one, two = Naming(), Naming()
    async with fleet(one, two) as it:
        one.version = "2"
        await it.hear(one, **body)
        await until(lambda: it.worker(one).weight_version == "2")
        assert (it.version, it.states, it.worker(two).weight_version) == ("1", ["ready", "ready"], "1")
        two.version = "2"
        await it.hear(two, **body)
        await until(lambda: it.version == "2")
        await it.questions_are_settled()
        assert it.moves.seen == [("2", "the workers' answers")]
        assert (it.states, it.changes.seen) == (["ready", "ready"], [])


async def test_chat_answers_of_engines_are_news_too() -> None:
    engine = Naming()
    async with fleet(engine) as it:
        engine.version = "2"
        await it.client.post("/v1/chat/completions", json={"messages": []})
        await until(lambda: it.version == "2")


class Reads:
    """A plugin that reads each answer before health hears it."""

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None  # narrowing: the hook is called for replies
        await exchange.reply.read()


async def test_answers_that_another_plugin_has_read_are_news_too() -> None:
    engine = Naming()
    async with fleet(engine, beside={"reads": Reads()}) as it:
        engine.version = "2"
        assert (await it.client.post("/v1/completions", json={})).json() == {}  # it names no version
        assert it.version == "1"
        await it.hear(engine)
        await until(lambda: it.version == "2")
        await it.hear(engine)


async def test_version_of_a_removed_worker_is_ignored() -> None:
    engine, other = Naming(), Naming()
    async with fleet(engine, other) as it:
        worker, asked = it.worker(engine), engine.questions
        engine.version, engine.info_hold = "2", anyio.Event()
        await it.hear(engine)
        await until(lambda: engine.questions > asked)
        await it.client.post("/remove_worker", json={"url": engine.url})
        engine.info_hold.set()
        await it.questions_are_settled()
        assert (it.version, worker.weight_version) == ("1", "1")


async def test_an_answer_of_a_worker_that_was_removed_is_no_news() -> None:
    engine = Naming()
    async with fleet(engine) as it, anyio.create_task_group() as tasks:
        engine.hold = anyio.Event()
        tasks.start_soon(it.generate)
        await until(lambda: len(engine.asked) == 1)
        engine.version = "2"
        await it.client.post("/remove_worker", json={"url": engine.url})
        engine.hold.set()
        await it.questions_are_settled()
        assert it.version == "1"


async def test_answer_of_one_engine_makes_the_router_ask_the_others() -> None:
    """Only one of them has traffic."""
    engines = [Naming() for _ in range(4)]
    async with fleet(*engines) as it:
        for engine in engines:
            engine.version = "2"
        await it.generate()
        await until(lambda: it.version == "2")
        assert len(it.moves.seen) == 1


@pytest.mark.parametrize("versions", [("2", "3", "2", "1"), ("a", "b", "a", "c")], ids=["numbers", "names"])
async def test_engines_updated_directly_in_turn_never_cause_a_503(
    start: Start, versions: tuple[str, ...]
) -> None:
    """Real engines, a real command line without flags; also back to versions that the fleet has had."""
    model = load_model()
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(
                serving(make_app(EngineSettings(weight_version="1"), lambda: model), grace_s=0.1)
            )
            for _ in range(3)
        ]
        running = await stack.enter_async_context(start())
        client, router = running.client, running.router
        for url in urls:
            await client.post("/add_worker", json={"url": url})
        statuses: set[int] = set()

        async def ask() -> None:
            while True:
                body = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}
                statuses.add((await client.post("/generate", json=body)).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            for version in versions:
                for url in urls:
                    update = {"model_path": "/m", "weight_version": version}
                    assert (await client.post(f"{url}/update_weights_from_disk", json=update)).is_success
                    await anyio.sleep(0.15)
                await until(lambda: router.weights.current == version)  # noqa: B023
                await until(lambda: all(each.state == "ready" for each in router.pool))
            tasks.cancel_scope.cancel()
        assert statuses == {200}
        assert {each.weight_version for each in router.pool} == {versions[-1]}


@pytest.mark.parametrize("seed", range(6))
async def test_generation_goes_on_whatever_direct_updates_come_in_whatever_order(seed: int) -> None:
    """Forwards, backwards and half; once all engines name one version the fleet has it, and uses all of them."""
    chance = random.Random(seed)
    engines = [Naming("1") for _ in range(3)]
    names = ["1", "2", "3", "10"] if seed % 2 else ["1", "a", "b", "2"]
    settings = Settings(interval_s=chance.choice([0.02, 0.5]), timeout_s=1, lag_s=chance.choice([0.1, 30]))
    async with fleet(*engines, settings=settings) as it:
        for _ in range(25):
            for _ in range(chance.randint(1, 3)):
                chance.choice(engines).version = chance.choice(names)
            for _ in range(chance.randint(0, 4)):
                assert (await it.generate(stream=chance.random() < 0.5)).status_code == 200
            await anyio.sleep(chance.choice([0, 0.01, 0.1]))
            if chance.random() < 0.3:
                version = chance.choice(names)
                for engine in engines:
                    engine.version = version
                await until(lambda: it.version == version and it.shown == {("ready", version)})  # noqa: B023


async def test_a_new_run_on_known_engines_is_followed_from_its_first_version() -> None:
    """They were started anew and registered again; no version of the new run is ahead of the old one's."""
    one, two = Naming("7"), Naming("7")
    async with fleet(one, two) as it:
        for engine in (one, two):
            engine.version = "default"
            await it.router.add_worker(engine.url)
        for version in ("1", "2"):
            for engine in (one, two):
                engine.version = version
                await it.hear(engine)
                await it.questions_are_settled()
                assert (await it.generate()).status_code == 200
            await until(lambda: it.version == version)  # noqa: B023
        assert it.states == ["ready", "ready"]


async def test_engines_with_a_constant_version_keep_the_announced_one() -> None:
    one, two = Naming("5"), Naming("5")
    async with fleet(one, two) as it:
        await it.client.post("/weight_version", json={"weight_version": "8"})
        await it.hear(one)
        await it.hear(two)
        await it.questions_are_settled()
        assert (it.version, it.states) == ("8", ["ready", "ready"])


async def test_announced_version_waits_for_workers_that_lack_it() -> None:
    """The one that has it is not in use; the other one is asked first, and says the old version again."""
    ahead, slow = Naming("7"), Naming("7")
    async with fleet(ahead, slow) as it:
        ahead.version = "8"
        stale(it.router.pool, it.worker(ahead), "its weights are at version '8', the fleet's at '7'")
        await it.client.post("/weight_version", json={"weight_version": "8"})
        await until(lambda: it.worker(ahead).state == "ready")
        await it.questions_are_settled()
        assert (it.version, [version for version, _ in it.moves.seen]) == ("8", ["8"])
        assert it.states == ["ready", "stale"]


async def test_fleet_does_not_move_to_the_initial_version() -> None:
    one, two = Naming("default"), Naming("default")
    async with fleet(one, two) as it:
        await it.client.post("/weight_version", json={"weight_version": "8"})
        await it.hear(one)
        await it.hear(two)
        await it.questions_are_settled()
        assert (it.version, it.states) == ("8", ["ready", "ready"])


async def test_updates_of_paused_engines_are_followed_afterwards() -> None:
    one, two = Naming("3"), Naming("3")
    async with fleet(one, two, settings=QUICK) as it:
        await it.client.post("/pause_generation", json={})
        for engine in (one, two):
            engine.version = "2"
            await anyio.sleep(0.2)
        assert (it.version, it.moves.seen) == ("3", [])
        await it.client.post("/continue_generation", json={})
        assert (await it.generate()).status_code == 200
        await until(lambda: it.version == "2" and it.states == ["ready", "ready"])
        await anyio.sleep(0.3)
        assert [version for version, _ in it.moves.seen] == ["2"]


async def test_fleet_version_follows_answers_that_other_plugins_parse(start: Start) -> None:
    """Of chat too, whose answer is made from one that the plugin reads."""
    flags = ("--plugin", "engine", "--engine-workers", "2", "--plugin", "radix_cache", "--plugin", "openai")
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with start(*flags) as running:
        client, router = running.client, running.router
        await until(lambda: len(router.pool) == 2 and all(each.state == "ready" for each in router.pool))
        for version, path, body in (
            ("1", "/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}),
            ("2", "/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}, "stream": True}),
            ("3", "/v1/chat/completions", chat),
            ("4", "/v1/chat/completions", chat | {"stream": True}),
        ):
            for worker in router.pool:
                update = {"model_path": "/m", "weight_version": version}
                await client.post(f"{worker.url}/update_weights_from_disk", json=update)
            assert (await client.post(path, json=body)).status_code == 200
            await until(lambda: router.weights.current == version)  # noqa: B023


# a worker with other weights


async def test_an_engine_with_old_weights_is_set_aside() -> None:
    """The trainer has announced the version, and one engine has not got it."""
    good, missed = Naming(), Naming()
    async with fleet(good, missed) as it:
        good.version = "2"
        await it.client.post("/weight_version", json={"weight_version": "2"})
        await it.hear(good)
        await until(lambda: it.states == ["ready", "stale"])
        assert it.worker(missed).reason == "its weights are at version '1', the fleet's at '2'"
        missed.version = "2"
        await until(lambda: it.states == ["ready", "ready"])


@pytest.mark.parametrize("version", ["default", "1"])
async def test_an_engine_that_answers_with_older_weights_is_set_aside(version: str) -> None:
    """It was started anew, between two probes."""
    good, anew = Naming("2"), Naming("2")
    async with fleet(good, anew) as it:
        anew.version = version
        await it.hear(anew)
        await until(lambda: it.states == ["ready", "stale"])
        assert (it.version, it.worker(anew).weight_version) == ("2", version)


async def test_a_late_answer_of_old_weights_does_not_move_a_worker_back() -> None:
    one, two = Naming(), Naming()
    async with fleet(one, two) as it, anyio.create_task_group() as tasks:
        hold = one.hold = two.hold = anyio.Event()
        ended: list[int] = []

        async def late(number: int) -> None:
            ended.append((await it.generate(stream=number % 2 == 1)).status_code)

        for number in range(4):
            tasks.start_soon(late, number)
        await until(lambda: len(one.asked) + len(two.asked) == 4)
        for engine in (one, two):
            engine.version, engine.hold = "2", None
        for engine in (one, two):
            await it.hear(engine)
        await until(lambda: it.version == "2")
        await it.questions_are_settled()
        asked = one.questions + two.questions
        hold.set()
        await until(lambda: ended == [200] * 4)
        await until(lambda: one.questions + two.questions > asked)  # when in doubt
        await it.questions_are_settled()
        assert [it.worker(engine).weight_version for engine in (one, two)] == ["2", "2"]
        assert (it.states, it.changes.seen, it.moves.seen) == (
            ["ready", "ready"],
            [],
            [("2", "the workers' answers")],
        )


async def test_workers_that_do_not_follow_are_set_aside_after_a_while() -> None:
    first, second, lags = Naming(), Naming(), Naming()
    async with fleet(first, second, lags, settings=QUICK) as it:
        first.version = "2"
        await anyio.sleep(0.6)
        assert (it.version, it.states) == ("1", ["ready"] * 3)  # one of three
        second.version = "2"
        await until(lambda: it.version == "2")
        await until(lambda: it.states == ["ready", "ready", "stale"])
        assert it.worker(lags).reason is not None
        lags.version = "2"
        await until(lambda: it.states == ["ready"] * 3)
        assert it.moves.seen == [("2", "the workers")]


async def test_a_torn_worker_is_not_brought_back_by_what_all_others_say() -> None:
    good, torn = Naming(), Naming()
    async with fleet(good, torn, settings=QUICK) as it:
        tear(it.router.pool, it.worker(torn), "it failed an update")
        good.version = torn.version = "2"
        await it.hear(good)
        await until(lambda: it.version == "2")
        await anyio.sleep(0.3)
        assert it.states == ["ready", "stale"]
        assert it.worker(torn).reason == "it failed an update"


@asynccontextmanager
async def only_old_weights(version: str) -> AsyncIterator[tuple[VersionedFleet, Naming, Naming]]:
    """Yield a fleet of version 3, its worker with that version, which is ill, and a stale one with ``version``."""
    good, old = Naming("3"), Naming("3")
    async with fleet(good, old, settings=QUICK) as it:
        old.version = version
        await until(lambda: it.states == ["ready", "stale"])
        good.is_well = False
        await until(lambda: it.states == ["quarantined", "stale"])
        yield it, good, old


async def test_old_weights_are_not_used_while_the_others_are_away() -> None:
    """Clients get a 503 and ask again; the fleet has moved only when the others are gone for good."""
    async with only_old_weights("2") as (it, good, old):
        await anyio.sleep(0.3)
        assert (it.version, it.states) == ("3", ["quarantined", "stale"])
        assert (await it.generate()).status_code == 503
        good.is_well = True
        await until(lambda: it.states == ["ready", "stale"])
        await it.client.post("/remove_worker", json={"url": good.url})
        await until(lambda: it.version == "2" and it.worker(old).state == "ready")


async def test_changed_old_weights_are_not_used_while_the_others_are_away() -> None:
    """A stale engine takes the updates that it lacks one after the other, or it restarts between two probes."""
    async with only_old_weights("1") as (it, _, old):
        old.version = "2"
        await until(lambda: it.worker(old).said_version == "2")
        await anyio.sleep(0.1)
        assert (it.version, it.states) == ("3", ["quarantined", "stale"])
        assert (await it.generate()).status_code == 503
        old.version = "3"
        await until(lambda: it.states == ["quarantined", "ready"])
        assert it.moves.seen == []


async def test_last_worker_in_use_that_is_moved_back_moves_the_fleet_back() -> None:
    away, used = Naming("3"), Naming("3")
    async with fleet(away, used, settings=QUICK) as it:
        away.is_well = False
        await until(lambda: it.states == ["quarantined", "ready"])
        used.version = "2"
        await until(lambda: (it.version, it.states) == ("2", ["quarantined", "ready"]))
        away.is_well = True
        await until(lambda: it.states == ["stale", "ready"])


async def test_restarted_engines_do_not_move_the_fleet_back() -> None:
    """They name the version of the files with which they start, and were not updated to it."""
    first, second, away = Naming("1"), Naming("1"), Naming("1")
    async with fleet(first, second, away, settings=QUICK) as it:
        for engine in (first, second, away):
            engine.version = "4"
        await until(lambda: it.version == "4")
        away.is_well = False
        await until(lambda: it.states == ["ready", "ready", "quarantined"])
        for engine in (first, second):
            engine.is_well = False
        await until(lambda: it.states == ["quarantined"] * 3)
        for engine in (first, second):
            engine.is_well, engine.version = True, "1"
        await until(lambda: it.states == ["stale", "stale", "quarantined"])
        await anyio.sleep(0.3)
        assert (it.version, it.states) == ("4", ["stale", "stale", "quarantined"])
        away.is_well = True
        await until(lambda: it.states == ["stale", "stale", "ready"])
        for engine in (first, second, away):
            engine.version = "5"
        await until(lambda: (it.version, it.states) == ("5", ["ready"] * 3))


@pytest.mark.parametrize(("version", "state"), [("1", "stale"), ("2", "ready")])
async def test_engine_that_failed_gets_no_request_before_its_weights_are_checked(
    version: str, state: str
) -> None:
    """One broken answer is all that shows a restart."""
    other, before, after = Naming("2"), Naming("2"), Naming(version)
    after.info_hold = anyio.Event()
    port = free_port()
    async with fleet(other, settings=LENIENT) as it, anyio.create_task_group() as tasks:
        async with serving(before.app, port=port, grace_s=0) as url:
            worker, _ = await it.router.add_worker(url)
            before.hold = other.hold = anyio.Event()
            for _ in range(2):  # one for each
                tasks.start_soon(it.break_off)
            await until(lambda: bool(before.asked and other.asked))
        other.hold.set()
        async with serving(after.app, port=port, grace_s=0):
            await until(lambda: after.questions > 0)
            for _ in range(20):
                assert (await it.generate()).status_code == 200
            assert not after.asked
            assert worker.reason == "it failed, and has not named its weights since"
            after.info_hold.set()
            await until(lambda: not worker.is_healthy or version == "2")
            await until(lambda: worker.state == state and UNCHECKED not in worker.holds)


async def test_engine_that_failed_a_probe_is_asked_for_its_weights_at_once() -> None:
    one, other = Naming("2"), Naming("2")
    async with fleet(one, other, settings=LENIENT) as it:
        it.router.weights.move("2", "a test")
        one.health_hold = anyio.Event()
        probes = one.probes
        await until(lambda: one.probes > probes)
        await it.break_at(one)
        await until(lambda: UNCHECKED not in it.worker(one).holds)
        one.health_hold.set()


@asynccontextmanager
async def held(one: Naming, other: Naming) -> AsyncIterator[VersionedFleet]:
    """A fleet in which ``one`` has failed, and does not tell its weights before ``info_hold`` is set."""
    async with fleet(one, other) as it:
        it.router.weights.move(one.version, "a test")
        one.info_hold = anyio.Event()
        await it.break_at(one)
        yield it
        one.info_hold.set()


async def test_old_weights_told_while_another_engine_was_held_are_set_aside() -> None:
    one, other = Naming("2"), Naming("2")
    async with held(one, other) as it:
        assert one.info_hold is not None
        other.version = "1"
        await it.hear(other)
        await until(lambda: it.worker(other).said_version == "1")
        assert it.worker(other).is_healthy  # none can replace it
        one.info_hold.set()
        await until(lambda: it.states == ["ready", "stale"])
        assert it.version == "2"


async def test_held_engine_that_becomes_the_last_one_is_used() -> None:
    other = Naming("2")
    async with held(Naming("2"), other) as it:
        drain(it.router.pool, it.worker(other))
        assert (await it.generate()).status_code == 200


async def test_the_last_worker_is_used_before_its_weights_are_checked() -> None:
    """The router cannot replace it: the version in each answer tells which weights it has."""
    before, after = Naming("2"), Naming("1")
    after.info_hold = anyio.Event()
    port = free_port()
    async with fleet(settings=LENIENT) as it, anyio.create_task_group() as tasks:
        async with serving(before.app, port=port, grace_s=0) as url:
            await it.router.add_worker(url)
            before.hold = anyio.Event()
            tasks.start_soon(it.break_off)
            await until(lambda: len(before.asked) > 0)
        async with serving(after.app, port=port, grace_s=0):
            await until(lambda: after.questions > 0)
            answer = await it.generate()
            assert answer.json()["meta_info"]["weight_version"] == "1"
            after.info_hold.set()


async def test_garbled_answer_of_the_newest_engine_moves_no_fleet_back() -> None:
    """A broken answer names no version, and is no sign that the engine has other weights than before."""
    restarted, updated = Naming("1"), Naming("1")
    async with fleet(restarted, updated, settings=QUICK) as it:
        for engine in (restarted, updated):
            engine.version = "13"
        await until(lambda: it.version == "13")
        restarted.is_well = False
        await until(lambda: it.states == ["quarantined", "ready"])
        updated.is_garbled = True
        await until(lambda: it.states == ["quarantined", "quarantined"])
        assert it.worker(updated).reason == "its answer to /model_info is not JSON"
        restarted.is_well, restarted.version = True, "1"
        await until(lambda: it.states == ["stale", "quarantined"])
        await anyio.sleep(0.2)
        assert (it.version, (await it.generate()).status_code) == ("13", 503)
        updated.is_garbled = False
        await until(lambda: it.states == ["stale", "ready"])
        assert it.moves.seen == [("13", "the workers")]


async def test_server_registered_in_place_of_an_engine_needs_no_json() -> None:
    """The version that the engine named before does not bind the server that is now at its address."""
    engine = Naming("1")
    async with fleet(engine, settings=QUICK) as it:
        engine.is_garbled = True
        assert (await it.client.post("/add_worker", json={"url": engine.url})).status_code == 200
        asked = engine.questions
        await until(lambda: engine.questions > asked + 5)
        assert it.states == ["ready"]


async def test_an_engine_that_only_its_answers_name_is_followed_forwards() -> None:
    engine = Naming()
    engine.is_mute = True
    async with fleet(engine) as it:
        await it.hear(engine)
        await until(lambda: it.version == "1")
        hold = engine.hold = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.generate)
            await until(lambda: len(engine.asked) > 1)
            engine.version, engine.hold = "2", None
            await it.hear(engine)
            await until(lambda: it.version == "2")
            hold.set()
        await it.questions_are_settled()
        assert (it.version, it.worker(engine).weight_version) == ("2", "2")


async def test_an_engine_whose_answers_contradict_it_is_asked_now_and_then_only() -> None:
    engine = Naming()
    async with fleet(engine) as it:
        engine.named = "9"
        began, asked = anyio.current_time(), engine.questions
        for _ in range(100):
            await it.generate()
        took = anyio.current_time() - began
        await it.questions_are_settled()
        assert engine.questions - asked <= 4 + took / 0.25
        assert it.version == "1"


async def test_workers_that_are_not_asked_are_left_as_they_are() -> None:
    """Failed answers, other paths, and a router that looks after nobody."""
    engine = Naming()
    async with fleet(engine, settings=Settings(disabled=True)) as it:
        engine.version = "2"
        await it.hear(engine)
        await it.client.get("/anything")
        await it.questions_are_settled()
        assert (it.version, it.worker(engine).weight_version) == ("1", "1")
        await it.client.post("/weight_version", json={"weight_version": "3"})
        assert it.version == "3"


async def test_streams_pass_as_they_come() -> None:
    engine = Naming()
    async with fleet(engine) as it:
        engine.hold = anyio.Event()
        async with it.client.stream("POST", "/generate", json={"text": "Hi", "stream": True}) as answer:
            pieces = answer.aiter_raw()
            first = await anext(pieces)
            assert first.endswith(b"}\n\n")
            engine.hold.set()
            rest = b"".join([piece async for piece in pieces])
            assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_breaks_off_tells_what_it_named_so_far() -> None:
    engine = Naming("0")
    async with fleet(engine) as it:
        engine.version = "2"
        engine.named = "2"
        engine.hold = anyio.Event()
        async with it.client.stream("POST", "/generate", json={"text": "Hi", "stream": True}) as answer:
            await anext(answer.aiter_raw())
        await until(lambda: it.version == "2")
        engine.hold.set()
