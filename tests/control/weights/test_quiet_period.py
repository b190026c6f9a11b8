from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from slime_control.calls.endpoints import CALLS
from slime_control.pausing.gate import Gate
from slime_control.weights.quiet_period import QuietPeriod

pytestmark = pytest.mark.anyio


async def tick() -> float:
    """Now, and a later moment than before."""
    await anyio.sleep(0.002)
    return anyio.current_time()


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", "/start_profile", "/stop_profile"])
async def test_calls_that_stop_nothing_excuse_nothing(path: str) -> None:
    quiet_period = QuietPeriod(Gate())
    began = await tick()
    with quiet_period.during(CALLS[path]):
        assert not quiet_period.covers(began)
    assert not quiet_period.covers(began)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/resume_memory_occupation"])
async def test_a_call_excuses_whatever_began_before_its_end(path: str) -> None:
    quiet_period = QuietPeriod(Gate())
    began = await tick()
    assert not quiet_period.covers(began)
    with suppress(ValueError), quiet_period.during(CALLS[path]):
        with quiet_period.during(CALLS[path]):
            await tick()
        assert quiet_period.covers(await tick())
        raise ValueError("the call failed")
    assert quiet_period.covers(began)
    assert not quiet_period.covers(await tick())


async def test_a_pause_lasts_until_generation_continues() -> None:
    gate = Gate()
    quiet_period = QuietPeriod(gate)
    gate.close()
    assert quiet_period.covers(await tick())
    gate.open()
    assert not quiet_period.covers(await tick())
