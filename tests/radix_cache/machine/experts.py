"""Experts of an engine whose router depends on token, place and weights, and what it tells of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from radix_cache.machine.adversary import Attempt

__all__ = ["EXPERTS", "SHAPE", "WAYS", "experts_of", "rows_in", "rows_of_attempt", "tell_experts"]

EXPERTS = "routed_experts"
SHAPE = (2, 2)
#: From this place on the experts need two bytes, before it one.
_WIDE = 30
#: Fields of requests: what the clients say about experts.
WAYS: tuple[dict[str, Any], ...] = (
    *({},) * 8,
    {"return_routed_experts": True},
    {"return_routed_experts": False},
    {"return_routed_experts": True, "routed_experts_start_len": 2},
)
#: What engines tell: the rows that were asked for; no rows; all rows, without saying so, as old engines do; too few.
_KINDS = (*("asked",) * 15, "none", "none", "all", "all", "short")


def experts_of(tokens: Sequence[int], weights: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the rows ``[token, 4]`` of ``tokens``, each under its own of the ``weights``."""
    places = np.arange(len(tokens))
    mixed = (np.array(tokens) * 7919 + places * 104_729 + np.array(weights) * 15_485_863) % 1_000_003
    rows = (mixed[:, None] * np.array((3, 5, 7, 11))) // 13
    narrow: npt.NDArray[np.int32] = (rows % np.where(places < _WIDE, 251, 997)[:, None]).astype("<i4")
    return narrow


def rows_of_attempt(attempt: Attempt) -> npt.NDArray[np.int32]:
    """Return the rows of all tokens that ``attempt`` has processed: the last one that it sampled is not."""
    tokens = (attempt.consumed + attempt.sampled)[:-1]
    weights = attempt.weights
    return experts_of(tokens, [*weights[:1] * (len(attempt.consumed) - 1), *weights])


def rows_in(value: str) -> npt.NDArray[np.int32]:
    """Return the rows ``[token, 4]`` in base64."""
    return np.frombuffer(base64.b64decode(value, validate=True), "<i4").reshape(-1, SHAPE[0] * SHAPE[1])


def tell_experts(attempt: Attempt, meta: dict[str, Any], body: dict[str, Any], random: Random) -> None:
    """Add the experts of ``attempt`` to ``meta``, in an answer to ``body``; in some way."""
    if not body.get("return_routed_experts"):
        return
    if attempt.tells is None:
        attempt.tells = random.choice(_KINDS)
    if attempt.tells == "none":
        return
    rows = rows_of_attempt(attempt)
    if attempt.tells != "all":
        start = body.get("routed_experts_start_len") or 0
        rows, meta[f"{EXPERTS}_start_len"] = rows[start:], start
    if attempt.tells == "short":
        rows = rows[:-1]
    meta[EXPERTS] = base64.b64encode(rows.tobytes()).decode()
