"""Embedded engines whose experts depend on the weights, as a real model's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from r3.replays import MOE, SHAPE, Replay, rows_in
from slime_engine.backend import Query, Run
from slime_engine.language import FloatArray
from slime_engine.stateless import StatelessBackend

__all__ = ["EXPERTS", "moved", "recompute", "versioned_experts"]

#: Experts of a layer: versions that differ by this number look alike.
EXPERTS: int = MOE["moe_experts"]
#: The attribute of a run with the version that computed each of its tokens.
_COMPUTED = "computed_under"


def versioned_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each weight version move all experts by its number; ``default`` is 0.

    Each row is of the weights that computed its token, which need not be those of the answer's end.
    """
    logits, routed_experts = StatelessBackend.logits, StatelessBackend.routed_experts

    async def noted(self: StatelessBackend, queries: Sequence[Query], version: str) -> list[FloatArray]:
        number = int(version) if version.isdecimal() else 0
        for query in queries:
            under: list[int] = query.run.__dict__.setdefault(_COMPUTED, [])
            del under[query.end - query.count :]  # a step whose logits were dropped is computed again
            under += [number] * (query.end - len(under))
        return await logits(self, queries, version)

    def experts(
        self: StatelessBackend, run: Run, ids: Sequence[int], start: int
    ) -> npt.NDArray[np.int32] | None:
        under = run.__dict__.get(_COMPUTED, [])
        rows = routed_experts(self, run, ids, start)
        if rows is None or len(under) < len(ids) - 1:
            return None
        return (rows + np.array(under[start : len(ids) - 1], np.int32)[:, None, None]) % np.int32(EXPERTS)

    monkeypatch.setattr(StatelessBackend, "logits", noted)
    monkeypatch.setattr(StatelessBackend, "routed_experts", experts)


def recompute(replay: Replay) -> None:
    """Let all sequences that have been retracted be computed again, as SGLang does."""
    for host in replay.hosts:
        for sequence in host.engine.scheduler.waiting.values():
            if sequence.run is not None:
                sequence.run.__dict__.pop(_COMPUTED, None)


def moved(replay: Replay, record: dict[str, Any]) -> list[int]:
    """The weight version of each row of ``record``, which has exact experts."""
    rows = rows_in(record["routed_experts"])
    assert rows.shape == (record["token_length"] - 1, *SHAPE)
    by = ((rows - replay.rows(record["tokens"])) % EXPERTS).reshape(len(rows), -1)
    assert (by == by[:, :1]).all()
    return [int(version) for version in by[:, 0]]
