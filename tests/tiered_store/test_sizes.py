"""The sizes of records that docs/plugins/tiered_store.md states."""

from __future__ import annotations

from random import Random

import pytest

from radix_cache.toy import pack, sampled, trajectories
from slime_radix_cache.demotion.demotion import Demotion
from slime_tiered_store.cold_records import LAYOUT
from slime_tiered_store.tiers.ssd.directory import Layout

TEXT_BYTES = 1  # of a token of the toy tokenizer


@pytest.mark.parametrize(("tokens", "response", "prompt"), [(2000, 38e3, 21e3), (20_000, 0.35e6, 0.17e6)])
def test_records_take_the_room_that_the_page_states(tokens: int, response: float, prompt: float) -> None:
    random = Random(1)
    kept = trajectories()
    demotion = Demotion(kept)
    kept.demotion = demotion
    ids = [random.choice((1, 2, 5, 6)) for _ in range(tokens)]
    logprobs = [-random.random() for _ in range(tokens)]
    kept.record(None, pack(*[1] * tokens), b"a" * tokens, sampled(*ids, logprobs=logprobs), "s")
    (one,) = kept.responses_of("s")
    assert one.parent is not None
    for segment, bytes_a_token, on_disk in ((one, 17, response), (one.parent, 8, prompt)):
        size = len(demotion.record(segment)[1]) + (4 - TEXT_BYTES) * tokens
        assert size / tokens == pytest.approx(bytes_a_token, rel=0.03)
        room = -(-(8 + size) // LAYOUT.bytes_per_token) * _slot_bytes()
        assert room == pytest.approx(on_disk, rel=0.03)


def _slot_bytes() -> int:
    one, two = (Layout(LAYOUT.block_bytes, slots).total_bytes for slots in (1, 2))
    assert two - one == 4224
    return two - one
