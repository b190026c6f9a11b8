from __future__ import annotations

import anyio
import pytest

from router_core import Exchange, Reply, Request
from slime_health.stillness import Stillness

pytestmark = pytest.mark.anyio


async def tick() -> float:
    """Now, and a later moment than before."""
    await anyio.sleep(0.002)
    return anyio.current_time()


def asked(stillness: Stillness, path: str) -> Exchange:
    exchange = Exchange(Request("POST", path.encode(), []))
    stillness.see(exchange)
    return exchange


def ended(exchange: Exchange, status: int | str = 200) -> None:
    if status == "left":
        exchange.hang_up()
    elif status != "refused":
        exchange.reply = Reply(int(status), [])
    exchange.close()


async def test_other_requests_excuse_nothing() -> None:
    stillness = Stillness()
    exchange = asked(stillness, "/generate")
    assert not stillness.excuses(await tick())
    ended(exchange)
    assert not stillness.excuses(await tick())


@pytest.mark.parametrize(
    "path", ["/update_weights_from_disk", "/update_weights_from_ipc?x=1", "/resume_memory_occupation"]
)
async def test_a_call_excuses_whatever_began_before_its_end(path: str) -> None:
    stillness = Stillness()
    began = await tick()
    assert not stillness.excuses(began)
    first, second = asked(stillness, path), asked(stillness, path)
    ended(first)
    assert stillness.excuses(await tick())
    ended(second, "left")
    assert stillness.excuses(began)
    assert not stillness.excuses(await tick())


@pytest.mark.parametrize(
    ("paused", "continued", "goes_on"),
    [
        (200, 200, False),
        (207, 207, False),
        (200, 502, True),
        (200, "refused", True),
        (200, "left", False),  # its client has left, and it went on
        ("left", 200, False),
        ("left", 502, True),
        (502, 502, False),
        ("refused", 502, False),
    ],
)
async def test_a_pause_lasts_until_generation_continues(
    paused: int | str, continued: int | str, goes_on: bool
) -> None:
    stillness = Stillness()
    ended(asked(stillness, "/pause_generation"), paused)
    assert stillness.excuses(await tick()) == (paused not in (502, "refused"))
    ended(asked(stillness, "/continue_generation"), continued)
    assert stillness.excuses(await tick()) == goes_on
