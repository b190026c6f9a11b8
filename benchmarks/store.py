"""The cost of the tiered store's index, compared with plain loops over the same blocks.

    python -m benchmarks.store [--only "1,000 blocks"] [--rounds N]

Sequences of 32 blocks of 16 tokens are inserted. Each prompt of 16 blocks has eight samples, which add 16 blocks each.
``plain loop`` keeps dicts by the key of a block. It looks at each block on its own, and to evict blocks it sorts all
leaves by age. ``keys`` is the time to hash a sequence. All times are the mean processor time of one call. In a round, a
figure is the mean of 100 calls, or of 1,000 calls if the index has 100,000 blocks or more. The mean of fewer calls
would be longer. The calls go to 100 indexes of 100 blocks in turn, to ten of 1,000 blocks, or to one larger index. For
each figure of an eviction, ``plain loop`` evicts only once from each index.

Then the script measures the eviction of one block, from an index of 50,000 leaves and from an index of one long
sequence. A median above 20 us with 50,000 leaves is a failure. ``fork_end`` and ``fork_begin`` insert a shorter
sequence: the blocks of the long sequence up to a place near its end, or near its beginning, and then one other block.
At the end, the script measures the memory of a block in the index, and of a block that an earlier process left on the
SSD.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from statistics import median
from typing import TypeVar

import numpy as np

from benchmarks.options import parse
from benchmarks.report import Column, Report
from slime_tiered_store.index import RadixTreeIndex
from slime_tiered_store.keys import Namespace, SequenceMeta
from slime_tiered_store.recovered_blocks import RecoveredBlocks

__all__ = ["main"]

_BLOCK, _PROMPT, _SAMPLES = 16, 16, 8
_BLOCKS = 32
_ROOT = Namespace("benchmark").root_key(_BLOCK, 16)
_CHECKSUM = b"12345678"
_LEAVES, _LIMIT_US = 50_000, 20.0
_T = TypeVar("_T")
_COLUMNS = tuple(
    Column(f"{name}_us", f"{name} us", 2) for name in ("keys", "match", "insert", "evict_1", "evict_sequence")
)


class _Ours:
    name = "radix index"

    def __init__(self) -> None:
        self._index = RadixTreeIndex(_BLOCK)
        self._next_id = 0

    def match(self, sequence: SequenceMeta) -> int:
        return self._index.match_prefix(sequence).num_matched_blocks

    def insert(self, sequence: SequenceMeta) -> None:
        match = self._index.match_prefix(sequence)
        count = sequence.num_blocks - match.num_matched_blocks
        if count:
            ids = list(range(self._next_id, self._next_id + count))
            self._next_id += count
            self._index.insert(sequence, ids, match, _CHECKSUM * count)

    def evict(self, count: int) -> int:
        return len(self._index.evict(count))


class _PlainLoop:
    name = "plain loop"

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._ages: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, int] = {}
        self._clock = 0

    def match(self, sequence: SequenceMeta) -> int:
        self._clock += 1
        for block in range(sequence.num_blocks):
            key = sequence.key(block)
            if key not in self._ids:
                return block
            self._ages[key] = self._clock
        return sequence.num_blocks

    def insert(self, sequence: SequenceMeta) -> None:
        for block in range(self.match(sequence), sequence.num_blocks):
            key, parent = sequence.key(block), sequence.key(block - 1)
            self._ids[key], self._ages[key], self._parents[key] = len(self._ids), self._clock, parent
            self._children[parent] = self._children.get(parent, 0) + 1

    def evict(self, count: int) -> int:
        evicted = 0
        while evicted < count and self._ids:
            leaves = sorted(
                (key for key in self._ids if not self._children.get(key)), key=self._ages.__getitem__
            )
            for key in leaves[: count - evicted]:
                del self._ids[key], self._ages[key]
                self._children.pop(key, None)
                self._children[self._parents.pop(key)] -= 1
                evicted += 1
        return evicted


def _sequences(count: int, seed: int) -> Iterator[SequenceMeta]:
    """Yield ``count`` sequences: eight samples for each prompt."""
    numbers = np.random.default_rng(seed)
    for number in range(count):
        if number % _SAMPLES == 0:
            prompt = numbers.integers(0, 150_000, _PROMPT * _BLOCK)
        answer = numbers.integers(0, 150_000, (_BLOCKS - _PROMPT) * _BLOCK)
        yield SequenceMeta(_ROOT, np.concatenate((prompt, answer)), _BLOCK)


def _cost_us(call: Callable[[_T], object], items: Sequence[_T]) -> float:
    """Return the mean processor time, in microseconds, of one call for each of ``items``."""
    begun = time.process_time()
    for item in items:
        call(item)
    return (time.process_time() - begun) / len(items) * 1e6


def _evict(peer: _Ours | _PlainLoop, count: int) -> Callable[[SequenceMeta], int]:
    return lambda sequence: peer.evict(count)


def _measure(report: Report, scenario: str, blocks: int, tries: int, rounds: int) -> None:
    """Fill indexes of both kinds with ``blocks`` blocks, and measure them in turn. ``tries``: calls for a figure."""
    count = max(100 * tries // blocks, 1)
    peers: list[list[_Ours | _PlainLoop]] = [[kind() for _ in range(count)] for kind in (_Ours, _PlainLoop)]
    of_prompt = _PROMPT + _SAMPLES * (_BLOCKS - _PROMPT)
    known: list[SequenceMeta] = []
    for sequence in _sequences(max(blocks * _SAMPLES // of_prompt, 1), seed=1):
        for peer in chain(*peers):
            peer.insert(sequence)
        known.append(sequence)
        if len(known) > tries:
            known.pop(random.Random(sequence.num_blocks).randrange(tries))
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        new = list(_sequences(tries, seed=2 + number))
        for same in peers[:: 1 if number % 2 else -1]:
            calls = list(zip(cycle(same), new, random.Random(number).choices(known, k=tries)))
            few = calls[: len(same) if isinstance(same[0], _PlainLoop) else tries]
            report.add(
                scenario,
                same[0].name,
                keys_us=_cost_us(lambda call: _hash(call[1].token_bytes), calls),
                match_us=_cost_us(lambda call: call[0].match(call[2]), calls),
                insert_us=_cost_us(lambda call: call[0].insert(call[1]), calls),
                evict_1_us=_cost_us(lambda call: call[0].evict(1), few),
                evict_sequence_us=_cost_us(lambda call: call[0].evict(_PROMPT), few),
            )
    gc.unfreeze()
    report.show(scenario, _COLUMNS)


def _hash(token_bytes: bytes) -> SequenceMeta:
    return SequenceMeta(_ROOT, np.frombuffer(token_bytes, "<i4"), _BLOCK)


def _measure_leaves(report: Report, leaves: int, rounds: int) -> None:
    """Measure the eviction of one block from an index whose leaves have one block each."""
    scenario = f"{leaves:,} leaves"
    peers = (_Ours(), _PlainLoop())
    for number in range(leaves):
        for peer in peers:
            peer.insert(SequenceMeta(_ROOT, [number], _BLOCK))
    for number in range(rounds):
        for peer in peers:
            tries = [SequenceMeta(_ROOT, [number], _BLOCK)] * (
                1 if isinstance(peer, _PlainLoop) else leaves // 100
            )
            cost = _cost_us(_evict(peer, 1), tries)
            report.add(scenario, peer.name, evict_1_us=cost)
    report.show(scenario, _COLUMNS[3:4])
    ours = median(sample["evict_1_us"] for sample in report.samples[scenario][_Ours.name])
    if leaves == _LEAVES and ours > _LIMIT_US:
        report.problem(f"{scenario}: to evict one block takes {ours:.1f} us, more than {_LIMIT_US:.0f}")


def _measure_one_sequence(report: Report, blocks: int, rounds: int) -> None:
    """Measure an index that has one sequence, in one node."""
    scenario = f"one sequence of {blocks:,} blocks"
    tokens = np.random.default_rng(1).integers(0, 150_000, blocks * _BLOCK)
    whole, again = (SequenceMeta(_ROOT, tokens, _BLOCK) for _ in range(2))
    tries = blocks // 100
    for _ in range(rounds):
        for peer in (_Ours(), _PlainLoop()):
            peer.insert(whole)
            forks = [np.append(tokens[: each * _BLOCK], [7] * _BLOCK) for each in (blocks - tries - 9, 9)]
            report.add(
                scenario,
                peer.name,
                match_us=_cost_us(peer.match, [again] * 3),
                evict_1_us=_cost_us(
                    _evict(peer, 1), [again] * (3 if isinstance(peer, _PlainLoop) else tries)
                ),
                **{
                    f"fork_{place}_us": _cost_us(peer.insert, [SequenceMeta(_ROOT, fork, _BLOCK)])
                    for place, fork in zip(("end", "begin"), forks, strict=True)
                },
            )
    figures = ("match", "evict_1", "fork_end", "fork_begin")
    report.show(scenario, tuple(Column(f"{name}_us", f"{name} us", 2) for name in figures))


def _measure_memory(report: Report, sequences: int) -> None:
    """Measure the memory of a block with its tokens in the index, and of a block in :class:`RecoveredBlocks`."""
    index = _Ours()
    for sequence in _sequences(1, seed=2):  # so that no import counts
        _Ours().insert(sequence)
    RecoveredBlocks(bytes(32), [0, 1])
    tracemalloc.start()
    for sequence in _sequences(sequences, seed=1):
        index.insert(sequence)
    blocks = max(sequences * _BLOCKS - sequences // _SAMPLES * _PROMPT * (_SAMPLES - 1), 1)
    report.add("memory", index.name, bytes_per_block=tracemalloc.get_traced_memory()[0] / blocks)
    keys = np.random.default_rng(1).bytes(16 * blocks)
    before = tracemalloc.get_traced_memory()[0]
    found = RecoveredBlocks(keys, np.arange(blocks))
    taken = tracemalloc.get_traced_memory()[0] - before + len(keys)
    report.add("memory", type(found).__name__, bytes_per_block=taken / blocks)
    tracemalloc.stop()
    report.show("memory", (Column("bytes_per_block", "bytes a block"),))


def main() -> int:
    options = parse("Costs of the tiered store's index, beside plain loops.")
    report = Report()
    tries = options.pick(1_000, tiny=10)
    for blocks in options.pick((100, 1_000, 10_000, 100_000, 1_000_000), tiny=(100, 1_000)):
        scenario = f"{blocks:,} blocks"
        if options.wants(scenario):
            _measure(report, scenario, blocks, min(tries, max(blocks // 100, 100)), options.rounds)
    if options.wants("leaves"):
        _measure_leaves(report, options.pick(_LEAVES, tiny=100), options.rounds)
    for blocks in options.pick((1_000, 10_000, 100_000), tiny=(1_000,)):
        if options.wants("one sequence"):
            _measure_one_sequence(report, blocks, options.rounds)
    if options.wants("memory"):
        _measure_memory(report, options.pick(8_000, tiny=80))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
