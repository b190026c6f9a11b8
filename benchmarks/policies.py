"""The time that policies cost a request, and the memory that ``cache_aware`` takes."""

from __future__ import annotations

import random
import string
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from benchmarks.options import Options, parse
from benchmarks.report import Column, Report
from router_core import Exchange, Worker
from router_core.reply import Reply
from router_core.request import Request
from slime_policies import CacheAware, Settings
from slime_policies.cached_tokens import CachedTokens
from slime_policies.horizons import Horizons
from slime_policies.kv_events import Blocks
from slime_policies.kv_events.batches import Hash, Stored
from slime_policies.plugin import POLICIES
from slime_policies.prefixes import Prefixes, Prompt, Use

_SIZES = (512, 8 << 10, 64 << 10)
_WORKERS = (8, 64)
_ROUNDS, _CALLS = 20, 200
_CHOICES, _MEMORY, _ANSWERS = "a choice", "cache_aware, prompts of", "cache_aware, an answer of"
_EVENTS = "cache_aware, a choice with KV events"
_BLOCK_MEMORY = "cache_aware, blocks of KV events"
#: Bytes of an id and its comma in the prompts with KV events, and the sizes of blocks.
_ID_BYTES, _BLOCKS = 6, (1, 16, 64)


def _asking(size: int, seed: int, shared: float, *, has_session: bool = False) -> Exchange:
    """Return a generation request with a prompt of ``size`` bytes.

    All prompts of this size begin with the same bytes. ``shared``: their share of the prompt, 0 to 1.
    """
    common = random.Random(size).choices(string.ascii_letters, k=int(size * shared))
    own = random.Random(seed).choices(string.ascii_letters, k=size - len(common))
    body = b'{"sampling_params": {"temperature": 1.0}, "text": "%s"}' % "".join(common + own).encode()
    return Exchange(
        Request("POST", b"/generate", [], body), session=f"session {seed}" if has_session else None
    )


def _best_us(options: Options, run: Callable[[int], None]) -> float:
    """Return the processor time of a call in microseconds, the least of some rounds. ``run(n)`` makes n calls."""
    best = float("inf")
    rounds, calls = options.pick((_ROUNDS, _CALLS), tiny=(1, 2))
    for _ in range(rounds):
        begun = time.process_time_ns()
        run(calls)
        best = min(best, (time.process_time_ns() - begun) / calls / 1000)
    return best


def _cost_us(options: Options, name: str, workers: Sequence[Worker], prompts: Sequence[Exchange]) -> float:
    policy = POLICIES[name](Settings())
    for worker in workers:  # so that each worker has got a prompt
        policy(prompts[0], [worker])
    for prompt in prompts:
        if policy(prompt, workers) not in workers:
            raise RuntimeError(f"{name} chose a worker that it was not offered")

    def choose(calls: int) -> None:
        for prompt in islice(cycle(prompts), calls):
            policy(prompt, workers)

    return _best_us(options, choose)


def _events_us(options: Options, count: int, size: int, block: int | None) -> float:
    """Return the time of a choice plus that of a call of ``answered``.

    Each worker has seen the first half of every prompt. ``block``: the number of tokens of a block in KV events; None:
    there are no KV events.
    """
    workers = [Worker(f"http://127.0.0.1:{port}") for port in range(1, count + 1)]
    tokens = size // _ID_BYTES
    common = random.Random(size).choices(range(10_000, 100_000), k=tokens // 2)
    prompts = []
    for seed in range(options.pick(50, tiny=3)):
        ids = common + random.Random(seed).choices(range(10_000, 100_000), k=tokens - len(common))
        body = b'{"sampling_params": {}, "input_ids": [%s]}' % ",".join(map(str, ids)).encode()
        prompts.append(Exchange(Request("POST", b"/generate", [], body), session=None))
    policy = CacheAware(Settings(kv_events=block is not None))
    for worker in workers:
        policy(prompts[0], [worker])
        policy.answered(prompts[0], tokens, 0)
        if block is not None and policy.blocks is not None:
            blocks = policy.blocks.open(worker.id)
            blocks.is_in_sync = True
            names: list[Hash] = [*range(len(common) // block)]
            blocks.apply(Stored(names, None, common[: len(names) * block], block))

    def choose(calls: int) -> None:
        for prompt in islice(cycle(prompts), calls):
            policy(prompt, workers)
            policy.answered(prompt, tokens, tokens // 2)

    return _best_us(options, choose)


def _memory_mb(size: int, part: int) -> float:
    """Return the memory, in MB, of a :class:`Prefixes` that is full of prompts of ``size`` bytes.

    A :class:`Prefixes` with 1/``part`` of the size is measured, and its memory is multiplied by ``part``.
    """
    seen = Prefixes(Settings().max_tree_size // part)
    horizons = Horizons()
    tracemalloc.start()
    number = 0
    while seen.size < Settings().max_tree_size // part - max(size, 2048):
        prompt = Prompt.of(b'"text":%d%s' % (number, b"x" * size))
        seen.add(prompt, seen.find(prompt), 1 << number % 64, Use(number), horizons)
        number += 1
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used * part / 1e6


def _block_bytes(count: int) -> float:
    """Return the memory of a block from KV events in bytes, the mean of ``count`` different blocks."""
    blocks = Blocks(count)
    tracemalloc.start()
    names: list[Hash] = [random.getrandbits(63) for _ in range(count)]
    blocks.open("a").apply(Stored(names, None, [0] * count, 1))
    del names
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / count


def _answer_us(options: Options, body: bytes, later: bool) -> float:
    """Return the time to find the number of cached tokens in ``body``.

    If ``later`` is True, return the time to read ``body`` after the number has been found.
    """
    reply = Reply(200, [])
    tap = CachedTokens(reply, lambda prompt, cached: None)
    tap.feed(body)

    def feed(calls: int) -> None:
        one = tap
        for _ in range(calls):
            if not later:
                one = CachedTokens(reply, lambda prompt, cached: None)
            one.feed(body)

    return _best_us(options, feed)


def main() -> int:
    options = parse(__doc__ or "")
    report = Report()
    prompts = options.pick(50, tiny=3)
    counts = options.pick(_WORKERS, tiny=_WORKERS[:1])
    sizes = options.pick(_SIZES, tiny=_SIZES[:1])
    rows = {
        "least_inflight": False,
        "cache_aware": False,
        "cache_aware, a new session": True,
        "consistent_hashing": True,
        "prefix_hash": False,
    }
    for row in filter(options.wants, rows):
        name = row.partition(",")[0]
        for count in counts:
            workers = tuple(Worker(f"http://127.0.0.1:{port}") for port in range(1, count + 1))
            for size in sizes:
                own, common = (
                    [_asking(size, seed, shared, has_session=rows[row]) for seed in range(prompts)]
                    for shared in (0, 0.5)
                )
                report.add(
                    _CHOICES,
                    f"{row}, {count} workers, {size:,} bytes",
                    own=_cost_us(options, name, workers, own),
                    common=_cost_us(options, name, workers, common),
                )
    for size in (128, 256, *sizes) if options.wants(_MEMORY) else ():
        report.add(_MEMORY, f"{size:,} bytes", mb=_memory_mb(size, options.pick(16, tiny=256)))
    for tokens in (10, 60_000) if options.wants(_ANSWERS) else ():
        logprobs = b",".join([b"[-0.12345,4567,null]"] * tokens)
        body = b'{"text":"","meta_info":{"prompt_tokens":120,"logprobs":[%b],"cached_tokens":8}}' % logprobs
        first, later = (_answer_us(options, body, each) for each in (False, True))
        report.add(_ANSWERS, f"{len(body):,} bytes", first=first, later=later)
    for count in counts if options.wants(_EVENTS) else ():
        for size in sizes:
            report.add(
                _EVENTS,
                f"{count} workers, {size:,} bytes",
                none=_events_us(options, count, size, None),
                **{f"of_{block}": _events_us(options, count, size, block) for block in _BLOCKS},
            )
    if options.wants(_BLOCK_MEMORY):
        count = options.pick(1_000_000, tiny=1000)
        report.add(_BLOCK_MEMORY, f"{count:,} blocks", bytes=_block_bytes(count))
    report.show(_BLOCK_MEMORY, (Column("bytes", "bytes of a block"),))
    of_blocks = [Column(f"of_{block}", f"blocks of {block} us") for block in _BLOCKS]
    report.show(_EVENTS, (Column("none", "no events us"), *of_blocks))
    report.show(_ANSWERS, (Column("first", "numbers us", 2), Column("later", "a later piece us", 2)))
    report.show(_CHOICES, (Column("own", "own prompts us", 1), Column("common", "half in common us", 1)))
    report.show(_MEMORY, (Column("mb", "MB at most"),))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
