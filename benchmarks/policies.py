"""The time that policies cost a request, and the memory that ``cache_aware`` takes."""

from __future__ import annotations

import random
import string
import time
import tracemalloc
from collections.abc import Sequence
from itertools import cycle, islice

from router_core import Exchange, Worker
from router_core.request import Request
from slime_policies import Settings
from slime_policies.plugin import POLICIES
from slime_policies.prefixes import Prompt, Seen

_SIZES = (512, 8 << 10, 64 << 10)
_WORKERS = (8, 64)
_ROUNDS, _CALLS = 20, 200


def _asking(size: int, seed: int, shared: float) -> Exchange:
    """A generation whose prompt has ``shared`` of its beginning in common with all others of its size."""
    common = random.Random(size).choices(string.ascii_letters, k=int(size * shared))
    own = random.Random(seed).choices(string.ascii_letters, k=size - len(common))
    body = b'{"sampling_params": {"temperature": 1.0}, "text": "%s"}' % "".join(common + own).encode()
    return Exchange(Request("POST", b"/generate", [], body), session=f"session {seed}")


def _cost_us(name: str, workers: Sequence[Worker], prompts: Sequence[Exchange]) -> float:
    policy = POLICIES[name](Settings())
    for worker in workers:  # so that each has seen something
        policy(prompts[0], [worker])
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = time.process_time_ns()
        for prompt in islice(cycle(prompts), _CALLS):
            policy(prompt, workers)
        best = min(best, (time.process_time_ns() - begun) / _CALLS / 1000)
    return best


def _memory_mb(size: int) -> float:
    """Of one worker that was sent nothing but prompts of ``size`` bytes, when it is full; taken from a part of it."""
    part = 16
    seen = Seen(Settings().max_tree_size // part)
    tracemalloc.start()
    number = 0
    while seen.size < Settings().max_tree_size // part - size:
        seen.add(Prompt.of(b'"text":%d%s' % (number, b"x" * size)))
        number += 1
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used * part / 1e6


def main() -> None:
    print("policy             workers  prompt bytes  own prompts us  half in common us")
    for name in ("least_inflight", "cache_aware", "consistent_hashing", "prefix_hash"):
        for count in _WORKERS:
            workers = tuple(Worker(f"http://127.0.0.1:{port}") for port in range(1, count + 1))
            for size in _SIZES:
                own = [_asking(size, seed, 0) for seed in range(50)]
                common = [_asking(size, seed, 0.5) for seed in range(50)]
                costs = (_cost_us(name, workers, own), _cost_us(name, workers, common))
                print(f"{name:18} {count:7} {size:13} {costs[0]:15.1f} {costs[1]:18.1f}")
    for size in (128, 256, *_SIZES):
        print(f"cache_aware, prompts of {size} bytes: {_memory_mb(size):.0f} MB for each worker at most")


if __name__ == "__main__":
    main()
