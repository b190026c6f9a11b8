"""Searches that wait for the store at the same time, and what happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from deadlines import until
from radix_cache.direct import generate
from radix_cache.shelf import Shelf
from radix_cache.toy import sampled, trajectories
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.limits import Limits

pytestmark = pytest.mark.anyio


class SlowShelf(Shelf):
    """Reads take until their event in ``gates`` is set, in the order of the reads; further reads take no time."""

    def __init__(self, *gates: anyio.Event) -> None:
        super().__init__()
        self.gates = list(gates)

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        if self.gates:
            await self.gates.pop(0).wait()
        return await super().fetch(keys)


async def test_deleted_session_is_gone_although_a_search_has_loaded_it() -> None:
    kept = trajectories(Limits(tokens=1))
    cold = ColdTrajectories(kept)
    first, second = anyio.Event(), anyio.Event()
    shelf = SlowShelf(first, second)
    await cold.open(shelf, "t")
    async with anyio.create_task_group() as demoting:  # two tokens a segment: none fits into memory
        demoting.start_soon(cold._saver.writer.run)
        demoting.start_soon(cold.run)
        generate(kept, "aa", sampled(2, 2), "s")
        await until(lambda: not kept.segments)
        async with anyio.create_task_group() as searching:
            searching.start_soon(cold.load_text, b"aab", "s")
            await until(lambda: len(shelf.gates) == 1)
            generate(kept, "aa", sampled(2, 2), "t")  # the search needs this too, and reads a second time
            await until(lambda: not kept.segments)
            first.set()
            await until(lambda: not shelf.gates)
            assert kept.responses_of("s"), "the search has loaded it, and waits"
            await cold.load_session("s")
            cold.forget("s")
            assert not kept.responses_of("s")
            second.set()
        assert not kept.responses_of("s")
        assert kept.has_lost("s")
        await cold.load_session("t")
        assert len(kept.responses_of("t")) == 1
        await until(lambda: not kept.segments)  # nothing is pinned any more
        await until(lambda: len(shelf.records) == 2)
        demoting.cancel_scope.cancel()
