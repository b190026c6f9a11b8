"""Memory per token of a process that keeps conversations: resident, and by the cache's own count."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from benchmarks.first_generation import Trie
from benchmarks.histories import Histories, Shape, record, record_first_generation
from slime_radix_cache.index.trajectories import Limits, Trajectories

__all__ = ["measure", "measure_first_generation"]


def measure(tokenizer: Path, shape: Shape, least_tokens: int, *, float32: bool) -> dict[str, float]:
    """Return bytes per token of the radix cache, resident and by its own count, and the sizes behind these figures.

    Conversations are recorded until there are ``least_tokens`` tokens. Each conversation has a session.
    """
    histories = Histories(tokenizer, shape, float32=float32)
    kept = Trajectories(Limits(versions=0), lambda ids, text: (0, 0))
    before = _resident_bytes()
    number = 0
    while kept.tokens < least_tokens:
        record(kept, histories.turns(number), f"rollout-{number:024}")
        number += 1
    resident = max(1, _resident_bytes() - before)
    return {
        "resident": resident / kept.tokens,
        "counted": kept.size_bytes / kept.tokens,
        "counted_percent": kept.size_bytes / resident * 100,
        "tokens": kept.tokens,
        "segments": kept.segments,
    }


def measure_first_generation(
    tokenizer: Path, shape: Shape, least_tokens: int, *, float32: bool
) -> dict[str, float]:
    """Return the resident bytes per token of the first generation's trie, which has no count of its own."""
    histories = Histories(tokenizer, shape, float32=float32)
    trie = Trie()
    before = _resident_bytes()
    tokens = number = 0
    while tokens < least_tokens:
        turns = histories.turns(number)
        record_first_generation(trie, turns)
        tokens += sum(len(turn.prompt_ids) + len(turn.ids) for turn in turns)
        number += 1
    return {"resident": (_resident_bytes() - before) / tokens, "tokens": tokens}


def _resident_bytes() -> int:
    """Return the resident memory of this process, without free memory that its heap holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024
