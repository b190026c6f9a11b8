"""Workers with stale weights, and their return."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from control.steered import RARE_PROBES, Steered, hung, steering
from holding import is_torn, stale, tear
from plugged import until
from router_core.workers import JOINING
from slime_health import Health
from slime_http.serving import serving
from slime_sglang.facts import described
from slime_testing import Running

pytestmark = pytest.mark.anyio

UPDATE = "/update_weights_from_disk"
PIECE = "/update_weights_from_distributed"
FAILED = (400, b'{"success": false, "message": "out of memory"}')


@contextmanager
def closed_port() -> Iterator[str]:
    """The URL of a port that is taken, and on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


async def update(running: Running, version: str, path: str = UPDATE) -> int:
    body = {"model_path": "/m", "weight_version": version}
    return (await running.client.post(path, json=body)).status_code


async def test_a_later_update_that_it_takes_brings_it_back() -> None:
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = FAILED
    async with steering(good, bad) as running:
        assert await update(running, "7") == 207
        worker = running.router.pool.find(bad.url)
        assert (worker.state, is_torn(worker), worker.weight_version) == ("stale", True, None)
        assert worker.reason == f"{UPDATE} failed: it answered 400"
        assert running.router.weights.current == "7"
        assert await update(running, "8") == 207
        assert worker.state == "stale"
        del bad.answers[UPDATE]
        assert await update(running, "9") == 200
        shown = described(worker)
        assert (shown["state"], shown["weight_version"], shown["reason"]) == ("ready", "9", None)


@pytest.mark.parametrize("missing", [1, 2])
async def test_worker_that_missed_a_piece_does_not_return_by_the_next_piece(
    missing: int,
) -> None:
    """A trainer that sends bucket after bucket names the same version with each."""
    good, bad = Steered(), Steered()
    async with steering(good, bad) as running:
        worker = running.router.pool.find(bad.url)
        for piece in (1, 2, 3):
            bad.answers = {PIECE: FAILED} if piece == missing else {}
            assert await update(running, "7", PIECE) == (207 if piece == missing else 200)
        assert (worker.state, is_torn(worker), worker.weight_version) == ("stale", True, None)
        assert await update(running, "8", PIECE) == 200
        assert (worker.state, is_torn(worker)) == ("stale", True)  # there may be more of them
        await running.client.post("/pause_generation", json={})
        assert (worker.state, is_torn(worker), worker.weight_version) == ("ready", False, "8")


async def test_one_that_could_not_be_reached_for_a_piece_has_missed_it() -> None:
    late = Steered()
    async with steering(Steered()) as running:
        with closed_port() as url:
            await running.router.add_worker(url)
            assert await update(running, "7", PIECE) == 207
        async with serving(late.app, port=int(url.rpartition(":")[2])):
            assert await update(running, "7", PIECE) == 200
            worker = running.router.pool.find(url)
            assert (worker.state, is_torn(worker)) == ("stale", True)
            assert await update(running, "7") == 200  # the whole of it
            await until(lambda: worker.state == "ready")  # when it was looked at
            assert not is_torn(worker)


async def test_a_call_about_something_else_brings_nobody_back() -> None:
    good, other = Steered(), Steered()
    async with steering(good, other) as running:
        await update(running, "7")
        worker = running.router.pool.find(other.url)
        stale(running.router.pool, worker, "it does not say which weights it has")
        for path in ("/flush_cache", "/abort_request", "/start_profile", "/release_memory_occupation"):
            assert (await running.client.post(path, json={"abort_all": True})).status_code == 200
            assert worker.state == "stale"


async def test_an_update_that_ends_late_makes_good_for_no_later_one() -> None:
    slow, worker = hung(), Steered()
    async with steering(slow, worker) as running, anyio.create_task_group() as tasks:
        ended: list[int] = []

        async def first() -> None:
            ended.append(await update(running, "7"))

        tasks.start_soon(first)
        await until(lambda: bool(slow.got) and worker.version == "7")
        hold, slow.hold = slow.hold, None
        worker.answers[UPDATE] = FAILED
        assert await update(running, "8") == 207
        assert hold is not None
        hold.set()
        await until(lambda: ended == [200])
        failed = running.router.pool.find(worker.url)
        assert (failed.state, is_torn(failed)) == ("stale", True)


async def test_a_removed_worker_leaves_no_debt_behind() -> None:
    bad = hung()
    bad.answers[UPDATE] = FAILED
    async with steering(Steered(), bad) as running, anyio.create_task_group() as tasks:
        removed = running.router.pool.find(bad.url)
        tasks.start_soon(update, running, "7")
        await until(lambda: bool(bad.got))
        await running.client.post("/remove_worker", json={"url": bad.url})
        assert bad.hold is not None
        bad.hold.set()
        await until(lambda: running.router.weights.current == "7")
        assert not is_torn(removed)


async def test_it_does_not_come_back_by_renaming_its_weights() -> None:
    """``/update_weight_version`` changes a name; the weights are torn as before."""
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = FAILED
    async with steering(good, bad) as running:
        await update(running, "7")
        await running.client.post("/update_weight_version", json={"new_version": "7"})
        worker = running.router.pool.find(bad.url)
        assert (worker.state, is_torn(worker)) == ("stale", True)


async def test_registering_it_again_is_a_fresh_start() -> None:
    good, bad = Steered(), Steered("7")
    bad.answers[UPDATE] = FAILED
    async with steering(good, bad) as running:
        await update(running, "7")
        await running.client.post("/workers", json={"url": bad.url})
        worker = running.router.pool.find(bad.url)
        assert (worker.state, is_torn(worker), worker.reason) == ("ready", False, None)
        bad.answers["/pause_generation"] = FAILED
        await running.client.post("/pause_generation", json={})
        await running.client.post("/continue_generation", json={})
        assert worker.state == "ready"  # nothing is owed from before


@pytest.mark.parametrize(
    ("failed", "settled"),
    [
        ("/pause_generation", "/continue_generation"),
        ("/continue_generation", "/continue_generation"),
        ("/resume_memory_occupation", "/resume_memory_occupation"),
        ("/release_memory_occupation", "/resume_memory_occupation"),
    ],
)
async def test_a_call_that_it_missed_and_makes_good_later(failed: str, settled: str) -> None:
    good, bad = Steered(), Steered()
    async with steering(good, bad) as running:
        if failed == "/continue_generation":
            await running.client.post("/pause_generation", json={})
        bad.answers[failed] = FAILED
        assert (await running.client.post(failed, json={})).status_code == 207
        worker = running.router.pool.find(bad.url)
        assert (worker.state, is_torn(worker)) == ("stale", True)
        assert await update(running, "7") == 200
        assert worker.state == "stale"  # it has the weights, and may still be paused, or without memory
        bad.answers.clear()
        assert (await running.client.post(settled, json={})).status_code == 200
        assert (worker.state, is_torn(worker)) == ("ready", False)


async def pull(running: Running, version: int) -> int:
    body = {"local_checkpoint_dir": "/m", "source_dir": "/s", "target_version": version}
    return (await running.client.post("/pull_weights", json=body)).status_code


@pytest.mark.parametrize("alone", [False, True])
async def test_who_could_not_pull_weights_has_none_of_the_update_that_loads_them(alone: bool) -> None:
    """The update succeeds there, with the weights that lay there before."""
    good, bad = Steered(), Steered()
    async with steering(good, bad) as running:
        worker = running.router.pool.find(bad.url)
        bad.answers["/pull_weights"] = FAILED
        if alone:
            body = {"workers": {bad.url: {"target_version": 7}}}
            assert (await running.client.post("/pull_weights", json=body)).status_code == 400
        else:
            assert await pull(running, 7) == 207
        assert (worker.state, is_torn(worker)) == ("stale", True)
        assert worker.reason == "/pull_weights failed: it answered 400"
        assert await update(running, "7") == 200
        assert (worker.state, worker.weight_version) == ("stale", None)
        assert running.router.weights.current == "7"
        bad.answers.clear()
        assert await pull(running, 8) == 200
        assert worker.state == "stale"  # it has the files, and has not loaded them
        assert await update(running, "8") == 200
        assert (worker.state, is_torn(worker), worker.weight_version) == ("ready", False, "8")


async def test_who_was_not_reached_to_pull_weights_has_to_do_it_too() -> None:
    late = Steered()
    async with steering(Steered()) as running:
        with closed_port() as url:
            await running.router.add_worker(url)
            assert await pull(running, 7) == 207
        worker = running.router.pool.find(url)
        async with serving(late.app, port=int(url.rpartition(":")[2])):
            assert await update(running, "7") == 200
            assert (worker.state, is_torn(worker)) == ("stale", True)
            assert await pull(running, 8) == 200
            assert await update(running, "8") == 200
            await until(lambda: (worker.state, worker.weight_version) == ("ready", "8"))


async def test_weights_that_nobody_could_pull_set_nobody_aside() -> None:
    workers = [Steered(), Steered()]
    async with steering(*workers) as running:
        for worker in workers:
            worker.answers["/pull_weights"] = FAILED
        assert await pull(running, 7) == 400
        assert [worker.state for worker in running.router.pool] == ["ready", "ready"]


async def test_an_adapter_that_one_has_not_keeps_nobody_from_serving() -> None:
    """A second attempt fails on those that have it; requests that name it fail where it is not."""
    good, bad = Steered(), Steered()
    bad.answers["/load_lora_adapter"] = (400, b'{"success": false, "error_message": "no such file"}')
    async with steering(good, bad) as running:
        answer = await running.client.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        assert answer.status_code == 207
        assert answer.json()["workers"][bad.url]["error_message"] == "no such file"
        assert [worker.state for worker in running.router.pool] == ["ready", "ready"]


async def test_one_that_was_not_reached_owes_nothing() -> None:
    """It is as it was: when it says that it has the fleet's weights, it does."""
    async with steering(Steered()) as running:
        await running.router.add_worker("http://127.0.0.1:9")
        assert await update(running, "7") == 207
        gone = running.router.pool.find("http://127.0.0.1:9")
        assert (gone.state, is_torn(gone)) == ("stale", False)


async def test_one_that_joins_owes_no_pause() -> None:
    """It begins as others that register while the fleet goes on."""
    joins = Steered()
    paths = ("/pause_generation", "/continue_generation")
    joins.answers |= dict.fromkeys(paths, (503, b"{}"))
    async with steering(Steered(), joins) as running:
        pool = running.router.pool
        worker = pool.find(joins.url)
        pool.hold(worker, JOINING, "it has not answered yet", "joining")
        for path in paths:
            assert (await running.client.post(path, json={})).status_code == 207
        assert list(worker.holds) == [JOINING]


@pytest.mark.parametrize(
    ("call", "back"),
    [
        ("/pause_generation", "/continue_generation"),
        ("/release_memory_occupation", "/resume_memory_occupation"),
    ],
)
async def test_one_that_joins_and_has_paused_owes_that_it_goes_on(call: str, back: str) -> None:
    joins = Steered()
    joins.answers[back] = (503, b"{}")
    async with steering(Steered(), joins) as running:
        pool = running.router.pool
        worker = pool.find(joins.url)
        pool.hold(worker, JOINING, "it has not answered yet", "joining")
        assert (await running.client.post(call, json={})).status_code == 200
        assert (await running.client.post(back, json={})).status_code == 207
        pool.release(worker, JOINING)
        assert (worker.state, is_torn(worker)) == ("stale", True)
        del joins.answers[back]
        assert (await running.client.post(back, json={})).status_code == 200
        assert worker.state == "ready"


async def test_reason_of_a_failed_call_is_shown_after_the_worker_recovers() -> None:
    bad = Steered()
    bad.answers["/pause_generation"] = (503, b"{}")
    async with steering(Steered(), bad) as running:
        pool = running.router.pool
        worker = pool.find(bad.url)
        pool.hold(worker, "health", "no answer", "quarantined")
        assert (await running.client.post("/pause_generation", json={})).status_code == 207
        assert worker.reason == "no answer"
        pool.release(worker, "health")
        assert "/pause_generation failed" in (worker.reason or "")


async def test_one_that_was_not_reached_comes_back_by_the_next_update() -> None:
    late = Steered()
    async with steering(Steered()) as running:
        with closed_port() as url:
            await running.router.add_worker(url)
            assert await update(running, "7") == 207
        async with serving(late.app, port=int(url.rpartition(":")[2])):
            assert await update(running, "8") == 200
            worker = running.router.pool.find(url)
            await until(lambda: (worker.state, worker.weight_version) == ("ready", "8"))


async def test_an_announcement_does_not_speak_for_those_that_were_left_behind() -> None:
    """A trainer that updates engines by itself tells the version of those in use."""
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = FAILED
    async with steering(good, bad) as running:
        await update(running, "7")
        await running.client.post("/weight_version", json={"weight_version": "8"})
        told = (await running.client.get("/weight_version")).json()
        assert told == {"weight_version": "8", "workers": {good.url: "8", bad.url: None}}


async def test_worker_torn_before_router_start_is_not_trusted_for_a_pause() -> None:
    """As after a kill, when the plugin ``state`` has brought the workers back."""
    async with steering(Steered(), Steered()) as running:
        worker = next(iter(running.router.pool))
        tear(running.router.pool, worker)
        await running.client.post("/pause_generation", json={})
        await running.client.post("/continue_generation", json={})
        assert (worker.state, is_torn(worker)) == ("stale", True)
        assert await update(running, "7") == 200
        assert not is_torn(worker)
        assert worker.state == "ready"


async def test_a_new_name_brings_back_nobody_that_has_other_weights() -> None:
    """An engine that was started anew says the fleet's version then, and does not have its weights."""
    good, anew = Steered(), Steered()
    async with steering(good, anew, beside={"health": Health(RARE_PROBES)}) as running:
        assert await update(running, "7") == 200
        worker = running.router.pool.find(anew.url)
        stale(running.router.pool, worker, "its weights are at version 'default', the fleet's at '7'")
        renamed = await running.client.post("/update_weight_version", json={"new_version": "8"})
        assert (renamed.status_code, worker.state, is_torn(worker)) == (200, "stale", True)
        assert await update(running, "9") == 200
        assert (worker.state, is_torn(worker)) == ("ready", False)


async def test_a_worker_that_is_updated_alone_and_fails_is_left_behind() -> None:
    """Its weights are unknown, and others are in use that were not asked."""
    good, bad = Steered(), Steered()
    bad.answers[UPDATE] = FAILED
    async with steering(good, bad) as running:
        body = {"workers": {bad.url: {"model_path": "/m", "weight_version": "7"}}}
        assert (await running.client.post(UPDATE, json=body)).status_code == 400
        worker = running.router.pool.find(bad.url)
        assert (worker.state, is_torn(worker), worker.weight_version) == ("stale", True, None)
        assert running.router.pool.find(good.url).state == "ready"
        assert running.router.weights.current == "default"
