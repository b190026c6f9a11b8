"""Look-ups per second of the radix cache, of the trie in ``first_generation.py``, and of memory accesses alone.

The texts of a batch are made just before the batch is looked up. So these texts are in a CPU cache, as a request's text
would be. The stored texts may be anywhere in memory. The time is processor time, so other processes on the core matter
little.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_generation import Trie
from benchmarks.histories import Histories, Shape, Turn, record, record_first_generation, text_of
from slime_http.memory import tune_gc
from slime_radix_cache.index.segments import context_ids, links
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.trajectories import Limits, Trajectories

__all__ = ["FIRST", "MATCH", "MEMORY", "OURS", "measure", "measure_toy"]

#: In this order: the whole look-up; the search without joining ids; reading and joining without the search; the trie.
OURS, MATCH, MEMORY, FIRST = "radix_cache", "match alone", "memory alone", "first generation"

_BATCH = 64
_TOY = Turn("Hello", array("i", [9707]), ", world", array("i", [11, 1879, 2]), [-0.5, -0.25, -0.125])

#: A function of a conversation's number and its text.
_Lookup = Callable[[int, str], object]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The memory that any index of texts has to read: the stored text, and the ids."""

    edges: tuple[bytes, ...]
    ids: tuple[bytes, ...]

    def compare(self, text: bytes) -> bytes:
        position = 0
        for edge in self.edges:
            if not text.startswith(edge, position):
                raise LookupError
            position += len(edge)
        return b"".join(self.ids)


class _Filled:
    """The same conversations in the radix cache and, if ``first_generation``, in the trie of the first generation."""

    def __init__(self, *, first_generation: bool) -> None:
        # No text here ends within an answer, so nothing has to be cut.
        self._kept = Trajectories(Limits(versions=0), lambda ids, text: (0, 0))
        self._trie = Trie() if first_generation else None
        self._pieces: dict[int, _Pieces] = {}

    def add(self, number: int, turns: list[Turn]) -> None:
        record(self._kept, turns)
        if self._trie is not None:
            record_first_generation(self._trie, turns)

    def lookups(self) -> dict[str, _Lookup]:
        kept, pieces, trie = self._kept, self._pieces, self._trie
        known: dict[str, _Lookup] = {
            OURS: lambda number, text: context_ids(kept.find_to_continue(text.encode()).context),
            MATCH: lambda number, text: kept.find_to_continue(text.encode()),
            MEMORY: lambda number, text: pieces[number].compare(text.encode()),
        }
        if trie is not None:
            known[FIRST] = lambda number, text: trie.find(text)
        return known

    def note_pieces(self, number: int, text: str) -> None:
        """Note where the pieces of ``text`` are. Call it after the last addition: each addition may move pieces."""
        context = self._kept.find_to_continue(text.encode()).context
        ids = [segment.ids for segment, _ in links(context)]
        edges = [node.edge for node in self._way(text)]
        self._pieces[number] = _Pieces(tuple(edges[::-1]), tuple(ids[::-1]))

    def edges(self, text: str) -> int:
        """Count the edges to the end of the known part of ``text``: the steps of the search."""
        return len(self._way(text))

    def _way(self, text: str) -> list[Node]:
        node: Node = self._kept._index.walk(text.encode()).node
        way = []
        while node.parent is not None:
            way.append(node)
            node = node.parent
        return way

    def check(self, number: int, text: str, turns: list[Turn]) -> None:
        """Check that the look-ups give the ids of all prompts and answers of ``turns``."""
        expected = sum((turn.prompt_ids + turn.ids for turn in turns), array("i"))
        match = self._kept.find_to_continue(text.encode())
        assert match.position == len(text_of(turns))
        assert context_ids(match.context) == expected.tobytes() == self._pieces[number].compare(text.encode())
        assert self._trie is None or self._trie.find(text).ids == expected.tolist()


def measure(
    tokenizer: Path, shape: Shape, conversations: int, rounds: int, seconds: float, *, first_generation: bool
) -> list[dict[str, float]]:
    """Record ``conversations`` conversations, and look up the next turns of some, chosen at random.

    Returns the look-ups per second of each round, and the mean number of ``edges`` of a text.
    """
    histories = Histories(tokenizer, shape)
    filled = _Filled(first_generation=first_generation)
    for number in range(conversations):
        filled.add(number, histories.turns(number))

    def next_turn(number: int) -> str:
        return text_of(histories.turns(number)) + histories.question(number)

    for number in range(conversations):
        filled.note_pieces(number, next_turn(number))
    checked = range(0, conversations, -(-conversations // _BATCH))
    for number in checked:
        filled.check(number, next_turn(number), histories.turns(number))
    edges = sum(filled.edges(next_turn(number)) for number in checked) / len(checked)
    drawn = random.Random(conversations)

    def batch() -> list[tuple[int, str]]:
        numbers = [drawn.randrange(conversations) for _ in range(_BATCH)]
        return [(number, next_turn(number)) for number in numbers]

    return [figures | {"edges": edges} for figures in _measured(filled.lookups(), batch, rounds, seconds)]


def measure_toy(rounds: int, seconds: float) -> list[dict[str, float]]:
    """Look up one short key, over and over."""
    filled = _Filled(first_generation=True)
    filled.add(0, [_TOY])
    text = text_of([_TOY])
    filled.note_pieces(0, text)
    filled.check(0, text, [_TOY])
    edges = filled.edges(text)
    samples = _measured(filled.lookups(), lambda: [(0, text)] * _BATCH, rounds, seconds)
    return [figures | {"edges": edges} for figures in samples]


def _measured(
    lookups: Mapping[str, _Lookup], batch: Callable[[], list[tuple[int, str]]], rounds: int, seconds: float
) -> list[dict[str, float]]:
    tune_gc()  # as the router does
    names = list(lookups)
    samples = []
    for round_ in range(rounds + 1):
        figures = {}
        for name in names:
            figures[name] = _rate(lookups[name], batch, seconds if round_ else seconds / 4)
        names.append(names.pop(0))
        if round_:
            samples.append(figures)
    return samples


def _rate(look_up: _Lookup, batch: Callable[[], list[tuple[int, str]]], seconds: float) -> float:
    done = spent_ns = 0
    while spent_ns < seconds * 1e9:
        texts = batch()
        start = time.thread_time_ns()
        for number, text in texts:
            look_up(number, text)
        spent_ns += time.thread_time_ns() - start
        done += len(texts)
    return done / spent_ns * 1e9
