"""The results of a run, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import orjson

from chaos.asking import AskedOnce
from chaos.faults import KINDS, Fault

__all__ = ["Report", "Use"]


@dataclass(frozen=True, slots=True)
class Use:
    """Resources of an idle router process.

    ``used_bytes``: memory that is allocated. ``kept_bytes``: its records, as the radix cache counts them.
    ``demoted``: the number of its records in the store.
    """

    open_files: int
    resident_bytes: int
    used_bytes: int
    tasks: dict[str, int]
    exchanges: int
    kept_bytes: int
    demoted: int

    def __str__(self) -> str:
        return (
            f"{self.open_files} open files, {self.resident_bytes >> 20} MiB resident, "
            f"{self.used_bytes >> 20} MiB in use ({self.kept_bytes >> 20} MiB of records), "
            f"{sum(self.tasks.values())} tasks, {self.exchanges} exchanges"
        )


@dataclass
class Report:
    """``wrong`` must be empty: each entry is a fault of the router, ``(kind, details)``.

    ``demoted``: that of ``/cache_stats``; None without a store. ``tiers``: those of ``/store``.
    """

    seed: int
    faults: Sequence[Fault]
    asked: Sequence[AskedOnce]
    before: Use
    seconds: float = 0.0
    conversations: int = 0
    turns: int = 0
    given_up: int = 0
    exact: int = 0
    flagged: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    complete: int = 0
    updates: int = 0
    whole_updates: int = 0
    stale: int = 0
    after: Use | None = None
    demoted: dict[str, Any] | None = None
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        outcomes = Counter(asked.outcome for asked in self.asked)
        lines = [
            f"{self.seconds:.0f} s of chaos, seed {self.seed}",
            "",
            f"{self.conversations} conversations, {self.given_up} of which ended with a turn that was given up; "
            f"{self.turns} finished turns",
            f"{len(self.asked)} requests: {_counts(outcomes)}",
            f"{self.updates} weight updates through the router, {self.whole_updates} of them taken by every engine",
            f"retrieved: {self.exact} exact, {self.flagged.total()} flagged ({_counts(self.flagged)}), "
            f"{sum(kind == 'retrieved tokens' for kind, _ in self.wrong)} WRONG",
            f"{self.sessions} sessions, {self.complete} of them complete",
            "",
            *self._kinds(),
            "",
            f"{self._quarantined()}; workers were found stale {self.stale} times",
            f"router before: {self.before}",
            f"router after:  {self.after}",
            *([f"store: {orjson.dumps(self.demoted).decode()}"] if self.demoted is not None else []),
            *(f"tier {name}: {_moved(tier)}" for name, tier in self.tiers.items()),
            "",
            f"WRONG: {len(self.wrong)}",
        ]
        for kind, count in Counter(kind for kind, _ in self.wrong).items():
            lines.append(f"{count} × {kind}")
            lines += [f"    {told}" for name, told in self.wrong if name == kind][:5]
        return "\n".join(lines)

    def _quarantined(self) -> str:
        times = [fault.quarantined_after_s for fault in self.faults if fault.quarantined_after_s is not None]
        if not times:
            return "nobody was killed"
        return f"from death to quarantine: median {median(times):.2f} s, longest {max(times):.2f} s, of {len(times)}"

    def _kinds(self) -> list[str]:
        """Requests by the faults that happened to them; one that its client left on purpose counts for nothing."""
        outcome = {rid: asked.outcome for asked in self.asked for rid in asked.rids}
        lines = [f"{'fault':20} injected requests hit survived  lost"]
        for kind in KINDS:
            own = [fault for fault in self.faults if fault.kind == kind]
            hit: set[str] = set().union(*(fault.hit for fault in own))
            met = Counter(outcome[rid] for rid in hit if outcome.get(rid, "left") != "left")
            survived = met.pop("200", 0)
            lost = met.total()
            numbers = f"{len(own):8} {survived + lost:12} {survived:8} {lost:5}"
            lines.append(f"{kind:20} {numbers}  {_counts(met) if lost else ''}".rstrip())
        return lines


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counter.most_common()) or "none"


def _moved(tier: dict[str, Any]) -> str:
    """Return the blocks of a tier, and how many have moved to it and from it."""
    keys = ("blocks", "capacity", "hits", "promotions", "demotions", "evicted_blocks", "errors")
    return ", ".join(f"{key} {tier[key]}" for key in keys if key in tier)
