"""A journal of the tokens that the engine consumed and sampled, written by the scheduler.

The journal is an oracle for tests of everything in front of an engine. The scheduler fills it, token by token. Replies
take their tokens and log-probabilities from the scheduler's deltas instead, so the journal shows a fault in a reply. An
entry is complete before its client can see the end of the sequence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

__all__ = ["Journal", "JournalEntry"]


class JournalEntry:
    """One generated sequence. ``text`` is the text that the engine returned, None until the sequence has ended."""

    __slots__ = (
        "dp_rank",
        "finish_reason",
        "index",
        "input_ids",
        "output_ids",
        "output_logprobs",
        "rid",
        "temperature",
        "text",
        "versions",
    )

    def __init__(
        self, index: int, rid: str, input_ids: Iterable[int], temperature: float, dp_rank: int
    ) -> None:
        self.index = index
        self.rid = rid
        self.dp_rank = dp_rank
        self.temperature = temperature
        self.input_ids = array("i", input_ids)
        self.output_ids = array("i")
        self.output_logprobs = array("d")
        #: ``(version, index of its first output token)``; a version holds until the next one begins.
        self.versions: list[tuple[str, int]] = []
        self.finish_reason: dict[str, Any] | None = None
        self.text: str | None = None

    def append(self, token_id: int, logprob: float, version: str) -> None:
        """Add a token that was sampled under the weights ``version``."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.output_ids)))
        self.output_ids.append(token_id)
        self.output_logprobs.append(logprob)

    def spans(self) -> list[tuple[str, int, int]]:
        """Return ``(version, start, end)`` over the output tokens, in order."""
        ends = [*self.versions, ("", len(self.output_ids))]
        return [(version, start, end) for (version, start), (_, end) in pairwise(ends)]

    def as_json(self) -> dict[str, Any]:
        reason = self.finish_reason
        return {
            "index": self.index,
            "rid": self.rid,
            "dp_rank": self.dp_rank,
            "input_ids": self.input_ids.tolist(),
            "output_ids": self.output_ids.tolist(),
            "output_logprobs": self.output_logprobs.tolist(),
            "output_versions": [version for version, start, end in self.spans() for _ in range(start, end)],
            "temperature": self.temperature,
            "finish_reason": reason,
            "aborted": reason is not None and reason["type"] == "abort",
            "text": self.text,
        }


class Journal:
    """The last ``size`` entries in the order in which the engine took the requests. ``on_open`` gets each new entry."""

    def __init__(self, size: int, on_open: Callable[[JournalEntry], None] | None = None) -> None:
        self._size = size
        self._on_open = on_open
        self._entries: deque[JournalEntry] = deque()
        self._opened = 0

    @property
    def dropped(self) -> int:
        """The number of entries that were dropped because there were more than ``size``."""
        return self._opened - len(self._entries)

    def open(self, rid: str, input_ids: Iterable[int], temperature: float, dp_rank: int = 0) -> JournalEntry:
        """Add and return an entry; drop the oldest one when there are too many."""
        entry = JournalEntry(self._opened, rid, input_ids, temperature, dp_rank)
        self._opened += 1
        self._entries.append(entry)
        if len(self._entries) > self._size:
            self._entries.popleft()
        if self._on_open is not None:
            self._on_open(entry)
        return entry

    def entries(self, rid: str | None = None) -> Iterator[JournalEntry]:
        """Return all entries, or all entries of one rid, oldest first. A rid that was reused has several entries."""
        return iter([entry for entry in self._entries if rid is None or entry.rid == rid])
