"""Turns for long work: who gets them, and that each comes back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Generator
from contextlib import suppress

import pytest

from slime_fairness.turns import FairThreads, FairTurns

pytestmark = pytest.mark.anyio


def steps(told: list[str], name: str, number: int) -> Generator[None, None, str]:
    for _ in range(number):
        told.append(name)
        yield
    return name


async def test_clients_get_turns_in_rotation() -> None:
    turns = FairTurns()
    told: list[str] = []
    long = [turns.run(steps(told, "a", 4), "a") for _ in range(3)]
    assert await asyncio.gather(*long, turns.run(steps(told, "b", 3), "b")) == ["a", "a", "a", "b"]
    assert told.index("b") <= 4  # those who had asked first have a turn each, at most
    assert [place for place, one in enumerate(told) if one == "b"][-1] <= 10  # then every other one is b's
    assert turns.waiting == 0


async def test_each_round_of_the_loop_has_one_step() -> None:
    turns = FairTurns()
    told: list[str] = []
    rounds = 0
    done = asyncio.Event()

    async def count() -> None:
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            assert len(told) <= rounds
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await asyncio.gather(*(turns.run(steps(told, str(client), 5), client) for client in range(8)))
    done.set()
    await counting
    assert len(told) == 40


async def test_a_turn_comes_back_from_what_fails_or_is_cancelled() -> None:
    turns = FairTurns(2)

    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await turns.run(failing(), "a")
    hold = asyncio.Event()

    async def held() -> None:
        async with turns.turn("a"):
            await hold.wait()

    tasks = [asyncio.ensure_future(held()) for _ in range(5)]
    await asyncio.sleep(0)
    assert turns.waiting == 3
    tasks[3].cancel()  # it waits
    await asyncio.sleep(0)
    assert turns.waiting == 2
    hold.set()
    await asyncio.sleep(0)  # it is the turn of the others, which do not know yet
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.waiting == 0
    async with turns.turn("a"), turns.turn("b"):
        pass


async def test_clients_get_threads_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_fairness.turns._threads", lambda: 1)
    threads = FairThreads()
    told: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> str:
        go_on.wait(60)
        told.append(name)
        return name

    some = [asyncio.ensure_future(threads.run(lambda: work("a"), "a")) for _ in range(4)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(threads.run(lambda: work("b"), "b"))
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*some, other) == ["a", "a", "a", "a", "b"]
    assert told.index("b") <= 2


async def test_an_error_out_of_a_thread_keeps_nothing_of_the_work() -> None:
    class Body:
        pass

    async def fail() -> weakref.ref[Body]:
        body = Body()

        def work() -> None:
            raise ValueError(f"refused {type(body)}")

        with suppress(ValueError):
            await FairThreads().run(work, None)
            raise AssertionError("the work failed")
        return weakref.ref(body)

    gc.disable()  # the garbage collector comes late in a router
    try:
        kept = await fail()
        await asyncio.sleep(0.05)  # the thread drops its last work
        assert kept() is None
    finally:
        gc.enable()
