"""Eviction frees everything: inserts and evictions leave no byte behind.

``SLIME_ROUTER_INSERTS=20000 pytest tests/radix_cache/index/test_memory.py`` has more of them than the suite.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from array import array
from random import Random

from radix_cache.toy import EOS, pack, sampled, spell, trajectories
from slime_radix_cache.index.losses import Losses, Marks
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Segment
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.trajectories import Limits, Trajectories

_INSERTS = int(os.environ.get("SLIME_ROUTER_INSERTS", "1000"))
#: Late losses are counted by their hashes, and an int has 28 to 36 bytes. A leak would show with each insert.
_HASHES_BYTES = 20_000


def rollouts(kept: Trajectories, random: Random, count: int) -> None:
    """Conversations that share beginnings and fork, each turn an insert; the limits evict as many."""
    flying: list[tuple[str, str]] = []
    for number in range(count):
        if len(flying) < 20 or random.random() < 0.2:
            text, session = spell([random.randint(1, 8) for _ in range(6)]), f"s{number}"
        else:
            text, session = flying.pop(random.randrange(len(flying)))
            text += spell([random.randint(1, 8)])
        prompt = text.encode()
        match = kept.find_to_continue(prompt, session)
        kept.pin(match.context)
        answer = sampled(*[random.randint(1, 8) for _ in range(5)], EOS, version="1")
        rest = pack(*range(len(prompt) - match.position))
        kept.record(match.context, rest, prompt, answer, session)
        kept.unpin(match.context)
        if random.random() < 0.8:
            flying.append((text + answer.text, session))


def live() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, (Segment, Node))]


def test_inserts_and_evictions_leave_no_byte_behind() -> None:
    random = Random(1)
    others = live()  # of other tests; held, so that their end does not hide anything
    tracemalloc.start()
    try:
        losses = Losses(Marks(exact=50), Marks(exact=50))
        kept = trajectories(Limits(tokens=5_000, versions=1), losses)
        rollouts(kept, random, 800)  # until the marks of what was lost are there
        kept.see_version("2")
        gc.collect()
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        evicted = kept.evicted.total()
        rollouts(kept, random, _INSERTS // 2 + 100)  # a prompt and a response each
        assert kept.segments > 100
        kept.see_version("3")
        gc.collect()
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept.evicted.total() - evicted >= _INSERTS
    assert (kept.segments, kept.tokens, kept.size_bytes) == (0, 0, 0)
    assert len(live()) == len(others) + 1  # the root
    assert peak - start > 200_000
    assert end - start < _HASHES_BYTES


def test_turn_of_94_tokens_takes_few_bytes_besides_its_own_data() -> None:
    turns = 1_000
    kept = Trajectories(Limits(versions=0), lambda ids, text: (0, 0))
    text_bytes = 0
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(turns):
            prompt, answer = f"{number} asks", f"{number} answers"
            text_bytes += len(prompt + answer)
            ids, logprobs = array("i", range(64)).tobytes(), array("f", [-0.5] * 64).tobytes()
            response = Sampled(ids, logprobs, answer, 63, "<|im_end|>", (("1", 64),), '{"type":"stop"}')
            asked = array("i", range(number, number + 30)).tobytes()
            kept.record(None, asked, prompt.encode(), response, f"rollout-{number:024}")
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    values = turns * (4 * 30 + 8 * 64) + text_bytes
    assert (taken - values) / turns < 900
    assert 0.9 < kept.size_bytes / taken < 1.2
