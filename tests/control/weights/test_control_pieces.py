"""Updates in pieces: who was not there for all of one gets no requests until it has all of another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import slime_control.weights.unannounced
from control.steered import RARE_PROBES
from control.weights.slotted import SLOTS, Slotted, up
from holding import is_torn, quarantine, ready, stale, tear
from plugged import routing, until
from router_core import Worker
from router_core.weights import WeightVersions
from slime_control import Control, Settings
from slime_health import Health
from slime_testing import Running

pytestmark = pytest.mark.anyio

PIECE = "/update_weights_from_tensor"
DISK = "/update_weights_from_disk"
PAUSE, CONTINUE, RENAME = "/pause_generation", "/continue_generation", "/update_weight_version"
BEGIN, END, POST_PROCESS = "/begin_weight_update", "/end_weight_update", "/post_process_weights"


class PiecewiseFleet:
    """Engines behind a router, and the trainer that updates them."""

    def __init__(self, running: Running, engines: tuple[Slotted, ...]) -> None:
        self.running = running
        self.engines = engines

    def worker(self, engine: Slotted) -> Worker:
        return self.running.router.pool.find(engine.url)

    def state(self, engine: Slotted) -> tuple[str, bool, str | None]:
        worker = self.worker(engine)
        return worker.state, is_torn(worker), worker.weight_version

    async def call(self, path: str, **body: Any) -> int:
        return (await self.running.client.post(path, json=body)).status_code

    async def piece(self, slot: int, round: int, version: str | None = None, **more: Any) -> int:
        named = {} if version is None else {"weight_version": version}
        return await self.call(PIECE, slot=slot, round=round, **named, **more)

    async def whole(self, round: int) -> None:
        """Round ``round``, all of it, as slime sends it."""
        await self.call(PAUSE)
        for slot in range(SLOTS):
            assert await self.piece(slot, round, str(round)) == 200
        await self.call(CONTINUE)

    async def register(self, engine: Slotted) -> None:
        await self.running.client.post("/workers", json={"url": engine.url})


@asynccontextmanager
async def fleet(
    count: int = 2, timeout_s: float = 10.0, beside: Mapping[str, object] | None = None
) -> AsyncIterator[PiecewiseFleet]:
    """A fleet of ``count`` engines; no health checks, which would bring them back."""
    engines = tuple(Slotted() for _ in range(count))
    plugins = {"control": Control(Settings(timeout_s, 10.0)), **(beside or {})}
    async with up(*engines), routing(plugins) as running:
        for engine in engines:
            await running.router.add_worker(engine.url)
        yield PiecewiseFleet(running, engines)


OUT = ("stale", True, None)


# who registers


@pytest.mark.parametrize("after", range(1, SLOTS))
async def test_worker_registered_between_pieces_waits_for_a_whole_update(
    after: int,
) -> None:
    async with fleet() as trainer:
        here, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            if slot == after:
                await trainer.register(late)
            assert await trainer.piece(slot, 8, "8") == 200
        await trainer.call(CONTINUE)
        assert late.version == "8"  # so it says
        assert not late.is_whole
        assert trainer.state(late) == OUT
        reason = trainer.worker(late).reason or ""
        assert reason.endswith("it comes back with all pieces of another update, or with an update from disk")
        assert trainer.state(here) == ("ready", False, "8")
        await trainer.whole(9)
        assert trainer.state(late) == trainer.state(here) == ("ready", False, "9")


async def test_one_that_registers_after_the_last_piece_has_what_it_began_with() -> None:
    async with fleet() as trainer:
        here, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        await trainer.register(late)
        await trainer.call(CONTINUE)
        assert trainer.state(late) == ("stale", False, "default")
        assert trainer.state(here) == ("ready", False, "8")
        await trainer.whole(9)
        assert trainer.state(late) == ("ready", False, "9")


async def test_one_that_registers_before_or_after_an_update_is_used() -> None:
    async with fleet(3) as trainer:
        _, before, after = trainer.engines
        for engine in (before, after):
            await trainer.call("/remove_worker", url=engine.url)
        await trainer.call(PAUSE)
        await trainer.register(before)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(before) == ("ready", False, "8")
        await trainer.register(after)
        assert trainer.state(after) == ("ready", False, "default")  # whoever registers it says so
        await trainer.whole(9)
        assert trainer.state(after) == ("ready", False, "9")


async def test_worker_reregistered_between_pieces_may_have_restarted() -> None:
    async with fleet() as trainer:
        here, again = trainer.engines
        await trainer.call(PAUSE)
        await trainer.piece(0, 8, "8")
        await trainer.register(again)
        await trainer.piece(1, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(again) == OUT
        assert trainer.state(here) == ("ready", False, "8")
        await trainer.register(again)  # the update is over: a fresh start, as ever
        assert trainer.state(again) == ("ready", False, "8")


async def test_worker_restarted_after_the_last_piece_has_its_first_weights() -> None:
    async with fleet() as trainer:
        _, anew = trainer.engines
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        anew.restart()
        await trainer.register(anew)
        await trainer.call(CONTINUE)
        assert trainer.state(anew) == ("stale", False, "default")


async def test_worker_reregistered_after_the_last_piece_with_its_version_is_used() -> None:
    async with fleet() as trainer:
        _, again = trainer.engines
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        await trainer.register(again)
        await trainer.call(CONTINUE)
        assert trainer.state(again) == ("ready", False, "8")


async def test_an_update_from_disk_is_enough_also_between_two_pieces() -> None:
    async with fleet() as trainer:
        _, again = trainer.engines
        await trainer.call(PAUSE)
        await trainer.piece(0, 8, "8")
        await trainer.register(again)
        await trainer.piece(1, 8, "8")
        assert trainer.state(again) == OUT
        await trainer.call(DISK, workers={again.url: {"round": 8, "weight_version": "8"}})
        assert trainer.state(again) == ("ready", False, "8")
        await trainer.piece(2, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(again) == ("ready", False, "8")
        assert again.is_whole


# how trainers name what they send


@pytest.mark.parametrize("named", ["last", "first", "behind", "never", "large"])
async def test_pause_delimits_an_update_whichever_piece_names_it(named: str) -> None:
    """Some name the version in one piece only, some behind all pieces; a large body is not read for it."""

    async def update(trainer: PiecewiseFleet, round: int, *, late: Slotted | None = None) -> None:
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            if slot == 1 and late is not None:
                await trainer.register(late)
            is_named = named == "large" or (slot == SLOTS - 1 if named == "last" else slot == 0)
            version = str(round) if is_named and named not in ("behind", "never") else None
            more = {"pad": "x" * (1 << 20)} if named == "large" else {}
            assert await trainer.piece(slot, round, version, **more) == 200
        if named == "behind":
            assert await trainer.call(RENAME, new_version=str(round)) == 200
        await trainer.call(CONTINUE)

    async with fleet() as trainer:
        here, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        for round in (7, 8):
            await update(trainer, round, late=late if round == 8 else None)
        assert trainer.state(late) == OUT
        await update(trainer, 9)
        assert trainer.state(late) == trainer.state(here)
        assert trainer.state(late)[:2] == ("ready", False)
        assert late.slots == [9] * SLOTS


async def test_versions_that_engines_began_with_name_no_update() -> None:
    """Engines that disagree about the version, and pieces that name none: it is one update all the same."""
    async with fleet(3) as trainer:
        one, other, bad = trainer.engines
        await trainer.call(DISK, round=2, weight_version="2")
        other.restart()
        await trainer.register(other)  # "default"
        await trainer.call(PAUSE)
        bad.next_up, one.next_up = "fail before", "fail before"
        assert await trainer.piece(0, 3) == 207  # by one that says "default"
        other.next_up = "fail before"
        assert await trainer.piece(1, 3) == 207  # by those that say "2"
        assert await trainer.piece(2, 3, "3") == 200
        await trainer.call(CONTINUE)
        assert [trainer.state(engine) for engine in trainer.engines] == [OUT] * 3


async def test_worker_registered_before_an_update_is_named_does_not_have_it() -> None:
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8)
        await trainer.register(late)
        assert await trainer.call(RENAME, new_version="8") == 200
        await trainer.call(CONTINUE)
        assert (late.version, late.slots) == ("8", [0] * SLOTS)
        assert trainer.state(late) == OUT


async def test_a_new_name_alone_is_no_piece_and_hides_no_other_weights() -> None:
    """One that is used with weights of its own would say then that it has the fleet's."""
    async with fleet(3) as trainer:
        here, anew, again = trainer.engines
        await trainer.whole(8)
        anew.restart()
        await trainer.register(anew)
        await trainer.register(again)
        assert trainer.state(anew) == ("ready", False, "default")
        assert await trainer.call(RENAME, new_version="best") == 200
        assert trainer.state(here) == trainer.state(again) == ("ready", False, "best")
        assert trainer.state(anew) == OUT
        await trainer.whole(9)
        assert trainer.state(anew) == ("ready", False, "9")


async def test_what_an_engine_began_with_is_not_the_name_of_an_update() -> None:
    """Though the router has never heard of it; it divides none in two, of which the second would settle the first."""
    async with fleet() as trainer:
        here, fresh = trainer.engines
        for engine in trainer.engines:
            engine.slots, engine.version = [7] * SLOTS, "7"
            await trainer.call("/remove_worker", url=engine.url)
        trainer.running.router.weights = WeightVersions()  # as if it had begun after they were updated
        for engine in trainer.engines:
            await trainer.register(engine)
        fresh.restart()
        quarantine(trainer.running.router.pool, trainer.worker(fresh), "connection refused")
        await trainer.call(PAUSE)
        here.next_up = "fail before"
        await trainer.piece(0, 8)  # of those that took it the only one says "default"
        await trainer.piece(1, 8)
        await trainer.piece(2, 8, "8")
        await trainer.call(CONTINUE)
        assert not here.is_whole
        trainer.running.router.pool.release(trainer.worker(fresh), "health")
        assert [trainer.state(engine) for engine in trainer.engines] == [OUT] * 2
        await trainer.whole(9)
        assert [trainer.state(engine) for engine in trainer.engines] == [("ready", False, "9")] * 2


async def test_unnamed_update_does_not_show_a_late_worker_by_its_version() -> None:
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8)
        await trainer.register(late)
        await trainer.call(CONTINUE)
        assert trainer.state(late) == OUT


async def test_engines_that_are_told_begin_and_end_need_no_pause() -> None:
    async with fleet() as trainer:
        here, late = trainer.engines
        for round in (8, 9):
            assert await trainer.call(BEGIN, selector="all") == 200
            if round == 9:
                late.next_up = "fail after"
            for slot in range(SLOTS):
                await trainer.piece(slot, round)
            await trainer.call(RENAME, new_version=str(round))
            assert await trainer.call(END) == 200
        assert (trainer.state(here), trainer.state(late)) == (("ready", False, "9"), OUT)
        # The same once more: another session is another update, whatever its name.
        await trainer.call(BEGIN, selector="all")
        for slot in range(SLOTS):
            await trainer.piece(slot, 9, "9")
            assert trainer.state(late) == OUT
        await trainer.call(END)
        assert trainer.state(late) == ("ready", False, "9")
        assert here.got == late.got


async def test_end_of_an_update_is_no_update_even_after_generation_continues() -> None:
    async with fleet() as trainer:
        _, bad = trainer.engines
        await trainer.call(PAUSE)
        await trainer.call(BEGIN)
        bad.next_up = "fail before"
        await trainer.piece(0, 8, "8")
        await trainer.call(CONTINUE)
        assert await trainer.call(END) == 200
        assert trainer.state(bad) == OUT


async def test_an_end_without_a_beginning_is_the_engines_matter() -> None:
    async with fleet() as trainer:
        assert await trainer.call(END) == 200
        assert [trainer.state(each) for each in trainer.engines] == [("ready", False, "default")] * 2


async def test_quantized_weights_are_prepared_before_and_finished_after_pieces() -> None:
    """An engine that fails either call has wrong weights, whatever pieces it takes."""
    async with fleet() as trainer:
        here, bad = trainer.engines
        for restores in (True, False):
            await trainer.call(PAUSE)
            bad.next_up = "fail before" if restores else ""
            await trainer.call(POST_PROCESS, restore_weights_before_load=True)
            for slot in range(SLOTS):
                await trainer.piece(slot, 8, "8" if restores else "9")
            bad.next_up = "" if restores else "fail before"
            await trainer.call(POST_PROCESS, post_process_quantization=True)
            await trainer.call(CONTINUE)
            assert trainer.state(bad) == OUT
            assert trainer.state(here) == ("ready", False, "8" if restores else "9")
        await trainer.whole(10)
        assert trainer.state(bad) == ("ready", False, "10")


async def test_worker_registered_before_the_end_of_an_update_is_out() -> None:
    async with fleet() as trainer:
        here, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        await trainer.call(BEGIN)
        await trainer.piece(0, 8, "8")
        await trainer.register(late)
        await trainer.call(END)
        assert trainer.state(late) == OUT
        assert trainer.state(here) == ("ready", False, "8")


@pytest.mark.parametrize("named", [True, False])
async def test_worker_registered_before_generation_continues_is_out(named: bool) -> None:
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        for slot in range(SLOTS):
            await trainer.call(PAUSE)
            await trainer.piece(slot, 8, "8" if named else None)
            if slot == SLOTS - 1:
                await trainer.register(late)
            await trainer.call(CONTINUE)
        assert trainer.state(late)[0] == "stale"


async def test_memory_that_is_released_and_resumed_is_around_an_update_too() -> None:
    """As on machines where engines and trainers take turns, which need no pause."""
    async with fleet() as trainer:
        here, late = trainer.engines
        await trainer.call("/remove_worker", url=late.url)
        for round in (8, 9):
            await trainer.call("/resume_memory_occupation", tags=["weights"])
            for slot in range(SLOTS):
                await trainer.piece(slot, round)
                if round == 8 and slot == 0:
                    await trainer.register(late)
            assert trainer.state(late) == OUT
            await trainer.call("/resume_memory_occupation", tags=["kv_cache"])
        assert trainer.state(late) == trainer.state(here) == ("ready", False, "default")


async def test_a_pause_that_is_repeated_ends_nothing() -> None:
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.call(PAUSE)
        await trainer.piece(0, 8)
        await trainer.register(late)
        await trainer.call(PAUSE)
        await trainer.piece(1, 8)
        await trainer.call(CONTINUE)
        assert trainer.state(late) == OUT


async def test_unread_body_begins_an_update_when_engines_report_a_new_version() -> None:
    async with fleet() as trainer:
        here, late = trainer.engines
        pad = "x" * (1 << 20)
        await trainer.piece(0, 7, "7", pad=pad)
        await trainer.register(late)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8", pad=pad)
        assert trainer.state(late) == OUT  # it seemed to be one more of the first
        await trainer.piece(0, 9, "9", pad=pad)
        assert trainer.state(late) == trainer.state(here) == ("ready", False, "9")


async def test_pieces_of_one_name_are_one_update_across_continued_generation() -> None:
    async with fleet() as trainer:
        here, bad = trainer.engines
        for slot in range(SLOTS):
            bad.next_up = "fail before" if slot == 1 else ""
            await trainer.call(PAUSE)
            await trainer.piece(slot, 8, "8")
            await trainer.call(CONTINUE)
        assert (trainer.state(here), trainer.state(bad)) == (("ready", False, "8"), OUT)
        assert (trainer.worker(bad).reason or "").startswith(
            f"{PIECE} failed: it answered 400; it comes back"
        )


async def test_without_a_pause_an_update_ends_when_the_next_begins() -> None:
    async with fleet() as trainer:
        here, bad = trainer.engines
        bad.next_up = "fail before"
        for round in (8, 9):
            for slot in range(SLOTS):
                await trainer.piece(slot, round, str(round))
            assert trainer.state(bad) == OUT
        assert bad.is_whole  # but nobody can know
        await trainer.piece(0, 10, "10")
        assert trainer.state(bad) == trainer.state(here) == ("ready", False, "10")


async def test_without_a_pause_silence_ends_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_control.weights.unannounced, "QUIET_S", 0.3)
    async with fleet(1) as trainer:
        (alone,) = trainer.engines
        alone.next_up = "fail after"
        assert await trainer.piece(0, 8, "8") == 400
        assert trainer.state(alone) == OUT
        await anyio.sleep(0.35)
        for slot in range(SLOTS):
            assert await trainer.piece(slot, 8, "8") == 200
            assert trainer.state(alone) == OUT
        await until(lambda: trainer.state(alone) == ("ready", False, "8"))


async def test_after_silence_one_that_registered_is_there_for_the_next_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slime_control.weights.unannounced, "QUIET_S", 0.2)
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.piece(0, 7)
        await trainer.register(late)
        await anyio.sleep(0.25)
        await trainer.piece(0, 8)
        assert trainer.state(late)[:2] == ("ready", False)


async def test_an_update_from_disk_for_all_ends_the_one_before() -> None:
    async with fleet() as trainer:
        _, late = trainer.engines
        await trainer.piece(0, 7)
        await trainer.call(DISK, round=8)
        await trainer.register(late)
        await trainer.piece(0, 9)
        assert trainer.state(late)[:2] == ("ready", False)


async def test_a_piece_that_is_under_way_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_control.weights.unannounced, "QUIET_S", 0.1)
    async with fleet() as trainer:
        slow, bad = trainer.engines
        bad.next_up = "fail before"
        await trainer.piece(0, 7, "7")
        await trainer.piece(0, 8, "8")
        slow.next_up, slow.lateness_s = "late", 0.5
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.piece, 1, 8, "8")
            await anyio.sleep(0.4)
            assert trainer.state(bad) == OUT
        await until(lambda: trainer.state(bad) == ("ready", False, "8"))


async def test_silence_during_a_pause_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_control.weights.unannounced, "QUIET_S", 0.1)
    async with fleet() as trainer:
        _, bad = trainer.engines
        bad.next_up = "fail before"
        await trainer.piece(0, 7, "7")
        await trainer.call(PAUSE)
        await trainer.piece(0, 8, "8")
        await anyio.sleep(0.3)
        assert trainer.state(bad) == OUT
        await trainer.piece(1, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(bad) == ("ready", False, "8")


# who fails


async def test_fleet_that_fails_a_piece_everywhere_waits_for_a_whole_update() -> None:
    """Each may have half of it. The same version may be tried again, after another pause."""
    async with fleet() as trainer:
        await trainer.call(PAUSE)
        await trainer.piece(0, 8, "8")
        for engine in trainer.engines:
            engine.next_up = "fail after"
        assert await trainer.piece(1, 8, "8") == 400
        assert [trainer.state(engine) for engine in trainer.engines] == [OUT] * 2
        await trainer.call(CONTINUE)
        answer = await trainer.running.client.post("/generate", json={"text": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_WORKER")
        await trainer.whole(8)
        assert [trainer.state(engine) for engine in trainer.engines] == [("ready", False, "8")] * 2


@pytest.mark.parametrize(("again", "state"), [("8", OUT), ("9", ("ready", False, "9"))])
async def test_update_is_resent_under_another_version_within_one_pause(
    again: str, state: tuple[str, bool, str | None]
) -> None:
    async with fleet() as trainer:
        await trainer.call(PAUSE)
        for engine in trainer.engines:
            engine.next_up = "fail after"
        await trainer.piece(0, 8, "8")
        for slot in range(SLOTS):
            await trainer.piece(slot, 9, again)
        await trainer.call(CONTINUE)
        assert [trainer.state(engine) for engine in trainer.engines] == [state] * 2


async def test_a_first_piece_that_all_refuse_as_no_such_request_changes_nothing() -> None:
    """A spelling mistake must not stop a fleet."""
    async with fleet() as trainer:
        for engine in trainer.engines:
            engine.next_up = "refuse"
        assert await trainer.piece(0, 8, "8") == 400
        assert [trainer.state(each) for each in trainer.engines] == [("ready", False, "default")] * 2


async def test_a_later_piece_that_all_refuse_is_missing() -> None:
    async with fleet() as trainer:
        await trainer.piece(0, 8, "8")
        for engine in trainer.engines:
            engine.next_up = "refuse"
        assert await trainer.piece(1, 8, "8") == 400
        assert [trainer.state(engine) for engine in trainer.engines] == [OUT] * 2


async def test_one_that_was_out_comes_not_back_without_a_piece_that_all_refused() -> None:
    async with fleet() as trainer:
        _, bad = trainer.engines
        bad.next_up = "fail before"
        for round in (8, 9):
            await trainer.call(PAUSE)
            for slot in range(SLOTS):
                await trainer.piece(slot, round, str(round))
                for engine in trainer.engines:
                    engine.next_up = "refuse" if (slot, round) == (SLOTS - 1, 8) else ""
            await trainer.call(CONTINUE)
            assert trainer.state(bad) == OUT
        assert not bad.is_whole
        await trainer.whole(10)
        assert trainer.state(bad) == ("ready", False, "10")


async def test_one_that_refuses_alone_what_was_for_it_only_is_as_it_was() -> None:
    async with fleet() as trainer:
        _, asked = trainer.engines
        for path in (PIECE, DISK):
            asked.next_up = "refuse"
            assert await trainer.call(path, workers={asked.url: {"slot": 0, "round": 8}}) == 400
            assert trainer.state(asked) == ("ready", False, "default")


@pytest.mark.parametrize("prelude", [BEGIN, "/post_process_weights"])
async def test_an_update_of_which_no_weights_came_makes_good_for_none(prelude: str) -> None:
    async with fleet() as trainer:
        _, bad = trainer.engines
        bad.next_up = "fail before"
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(bad) == OUT
        await trainer.call(PAUSE)
        assert await trainer.call(prelude, restore_weights_before_load=True) == 200
        await trainer.call(CONTINUE)  # as of a trainer that had an error
        assert not bad.is_whole
        assert trainer.state(bad) == OUT
        await trainer.whole(9)
        assert trainer.state(bad) == ("ready", False, "9")


async def test_worker_by_worker_each_has_its_own_pieces() -> None:
    async with fleet() as trainer:
        here, bad = trainer.engines
        for round in (8, 9):
            await trainer.call(PAUSE)
            bad.next_up = "fail before" if round == 8 else ""
            for slot in range(SLOTS):
                for engine in trainer.engines:
                    body = {"slot": slot, "round": round, "weight_version": str(round)}
                    await trainer.call(PIECE, workers={engine.url: body})
            await trainer.call(CONTINUE)
            assert trainer.state(here) == ("ready", False, str(round))
            assert trainer.state(bad) == (OUT if round == 8 else ("ready", False, "9"))


@pytest.mark.parametrize("pad", [0, 1 << 20], ids=["small", "large"])
async def test_changes_to_weights_make_nobody_whole_that_had_not_all_of_them(pad: int) -> None:
    async with fleet() as trainer:
        _, bad = trainer.engines
        bad.next_up = "fail before"
        for round in (8, 9):
            await trainer.call(PAUSE)
            for slot in range(SLOTS):
                await trainer.piece(
                    slot, round, str(round), load_format="distributed_delta_sparse_indices", names="x" * pad
                )
            await trainer.call(CONTINUE)
            assert trainer.state(bad) == OUT
        await trainer.whole(10)
        assert trainer.state(bad) == ("ready", False, "10")


async def test_worker_set_aside_between_pieces_may_have_restarted() -> None:
    """As health does it for a process that does not answer, or says that it has other weights."""
    async with fleet(3) as trainer:
        _, silent, other = trainer.engines
        await trainer.call(PAUSE)
        await trainer.piece(0, 8, "8")
        pool = trainer.running.router.pool
        quarantine(pool, trainer.worker(silent), "connection refused")
        stale(pool, trainer.worker(other), "its weights are at version 'default', the fleet's at '8'")
        await trainer.piece(1, 8, "8")
        await trainer.call(CONTINUE)
        pool.release(trainer.worker(silent), "health")
        assert trainer.state(silent) == trainer.state(other) == OUT


async def test_worker_quarantined_between_pieces_is_not_trusted_by_version() -> None:
    """While the pieces have no name, one that was started anew says what the others say."""
    async with fleet() as trainer:
        _, anew = trainer.engines
        await trainer.call(PAUSE)
        await trainer.piece(0, 8)
        pool = trainer.running.router.pool
        quarantine(pool, trainer.worker(anew), "connection refused")
        anew.restart()
        ready(pool, trainer.worker(anew))
        await trainer.piece(1, 8)
        await trainer.call(CONTINUE)
        assert trainer.state(anew) == OUT


async def test_worker_quarantined_during_an_update_may_restart_at_any_time() -> None:
    async with fleet() as trainer:
        _, silent = trainer.engines
        quarantine(trainer.running.router.pool, trainer.worker(silent), "connection refused")
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(silent) == ("quarantined", True, None)
        trainer.running.router.pool.release(trainer.worker(silent), "health")
        assert trainer.state(silent) == OUT
        await trainer.whole(9)
        assert trainer.state(silent) == ("ready", False, "9")


async def test_worker_set_aside_before_an_update_returns_with_all_of_it() -> None:
    async with fleet(beside={"health": Health(RARE_PROBES)}) as trainer:
        _, other = trainer.engines
        worker = trainer.worker(other)
        stale(trainer.running.router.pool, worker, "its weights are at version '1', the fleet's at '8'")
        await trainer.call(PAUSE)
        for slot in range(SLOTS):
            await trainer.piece(slot, 9, "9")
            assert trainer.state(other) == OUT
        await trainer.call(CONTINUE)
        assert trainer.state(other) == ("ready", False, "9")


async def test_worker_with_an_unanswered_piece_is_out_on_continue() -> None:
    async with fleet() as trainer, anyio.create_task_group() as tasks:
        _, slow = trainer.engines
        await trainer.call(PAUSE)
        slow.next_up, slow.lateness_s = "late", 0.5
        tasks.start_soon(trainer.piece, 0, 8, "8")
        await until(lambda: PIECE in slow.got)
        await trainer.call(CONTINUE)
        assert trainer.state(slow) == OUT


async def test_one_that_registers_while_a_piece_is_with_it_may_not_have_taken_it() -> None:
    async with fleet() as trainer, anyio.create_task_group() as tasks:
        _, slow = trainer.engines
        slow.next_up, slow.lateness_s = "late", 0.3
        await trainer.call(PAUSE)
        tasks.start_soon(trainer.piece, 0, 8, "8")
        await until(lambda: PIECE in slow.got)
        await trainer.register(slow)
        await until(lambda: trainer.state(slow) == OUT)


async def test_worker_torn_before_router_start_is_not_mended_by_same_update() -> None:
    """As after a kill between two pieces, when the plugin ``state`` has brought the workers back."""
    async with fleet() as trainer:
        _, torn = trainer.engines
        router = trainer.running.router
        router.weights.move("8", "state")
        tear(router.pool, trainer.worker(torn))
        await trainer.call(PAUSE)
        await trainer.piece(2, 8, "8")
        await trainer.call(CONTINUE)
        assert trainer.state(torn) == OUT
        await trainer.whole(9)
        assert trainer.state(torn) == ("ready", False, "9")


async def test_worker_torn_before_router_start_is_not_mended_by_its_rest() -> None:
    """The same, and the version is told behind all pieces: the fleet had not moved when the router was killed."""
    async with fleet() as trainer:
        _, torn = trainer.engines
        router = trainer.running.router
        router.weights.move("7", "state")
        for engine in trainer.engines:
            engine.slots, engine.version = [8, 7, 7], "7"
        torn.slots[0] = 7
        tear(router.pool, trainer.worker(torn))
        for slot in (1, 2):
            await trainer.piece(slot, 8)
        await trainer.call(RENAME, new_version="8")
        await trainer.call(CONTINUE)
        await trainer.call(PAUSE)
        assert not torn.is_whole
        assert trainer.state(torn) == OUT
        await trainer.call(CONTINUE)
        await trainer.whole(9)
        assert trainer.state(torn) == ("ready", False, "9")
