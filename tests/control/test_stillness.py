from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from slime_control.calls import CALLS
from slime_control.gate import Gate
from slime_control.stillness import Stillness

pytestmark = pytest.mark.anyio


async def tick() -> float:
    """Now, and a later moment than before."""
    await anyio.sleep(0.002)
    return anyio.current_time()


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", "/start_profile", "/stop_profile"])
async def test_calls_that_stop_nothing_excuse_nothing(path: str) -> None:
    stillness = Stillness(Gate())
    began = await tick()
    with stillness.during(CALLS[path]):
        assert not stillness.excuses(began)
    assert not stillness.excuses(began)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/resume_memory_occupation"])
async def test_a_call_excuses_whatever_began_before_its_end(path: str) -> None:
    stillness = Stillness(Gate())
    began = await tick()
    assert not stillness.excuses(began)
    with suppress(ValueError), stillness.during(CALLS[path]):
        with stillness.during(CALLS[path]):
            await tick()
        assert stillness.excuses(await tick())
        raise ValueError("the call failed")
    assert stillness.excuses(began)
    assert not stillness.excuses(await tick())


async def test_a_pause_lasts_until_generation_continues() -> None:
    gate = Gate()
    stillness = Stillness(gate)
    gate.close()
    assert stillness.excuses(await tick())
    gate.open()
    assert not stillness.excuses(await tick())
