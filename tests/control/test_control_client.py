"""A trainer's calls: pause, update, continue."""

from __future__ import annotations

import anyio
import pytest

from control.steered import Steered, steering
from slime_control.client import ControlFailed, RouterClient

pytestmark = pytest.mark.anyio


async def test_a_trainers_step_is_three_calls_in_order() -> None:
    workers = [Steered(), Steered()]
    async with steering(*workers) as running, RouterClient(running.url) as router:
        async with router.paused(mode="retract"):
            held = running.control.gate.closed
            done = await router.update_weights_from_disk("/m/7", weight_version="7", flush_cache=False)
        assert (held, done["success"], running.control.gate.closed) == (True, True, False)
        assert running.router.weights.current == "7"
    for worker in workers:
        assert worker.bodies("/pause_generation") == [{"mode": "retract"}]
        update = {"model_path": "/m/7", "weight_version": "7", "flush_cache": False}
        assert worker.bodies("/update_weights_from_disk") == [update]
        paths = [path for _, path, _ in worker.got]
        assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


async def test_generation_continues_after_an_error_and_after_a_cancellation() -> None:
    worker = Steered()
    async with steering(worker) as running, RouterClient(running.url) as router:
        with pytest.raises(ValueError, match="mine"):
            async with router.paused():
                raise ValueError("mine")
        assert not running.control.gate.closed
        with anyio.move_on_after(0.2):
            async with router.paused():
                await anyio.sleep_forever()
        assert not running.control.gate.closed
    assert len(worker.bodies("/continue_generation")) == 2


async def test_what_some_failed_is_returned_and_what_all_failed_is_raised() -> None:
    good, bad = Steered(), Steered()
    bad.answers["/flush_cache"] = (400, b"busy")
    async with steering(good, bad) as running, RouterClient(running.url) as router:
        assert (await router.flush_cache())["success"] is False
        good.answers = bad.answers
        with pytest.raises(ControlFailed, match="400: /flush_cache: 0 of 2") as failed:
            await router.flush_cache()
        assert failed.value.status == 400
        assert failed.value.answer["workers"][bad.url]["message"] == "busy"


async def test_aborts_name_one_or_all() -> None:
    worker = Steered()
    async with steering(worker) as running, RouterClient(running.url) as router:
        await router.abort("r")
        await router.abort()
        assert worker.bodies("/abort_request") == [{"rid": "r"}, {"abort_all": True}]
        await running.client.post("/remove_worker", json={"url": worker.url})
        with pytest.raises(ControlFailed, match="503: no worker is registered"):
            await router.abort()


async def test_what_is_no_answer_of_a_routers_is_raised_too() -> None:
    worker = Steered()  # which nobody should take for a router
    worker.answers = {"/flush_cache": (500, b"oops"), "/start_profile": (500, b"[1]")}
    async with steering(worker), RouterClient(worker.url) as router:
        with pytest.raises(ControlFailed, match="500: oops"):
            await router.flush_cache()
        with pytest.raises(ControlFailed, match=r"500: \[1\]"):
            await router.call("/start_profile")
