"""Holds the experts that a router tells of tokens against all facts: aligned, of the right weights, or a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from radix_cache.machine.experts import EXPERTS, SHAPE, experts_of, rows_in
from radix_cache.machine.facts import Fact
from radix_cache.machine.judge import Judge

__all__ = ["check_experts", "check_heard"]

_REASONS = {
    *("not_told", "not_recorded", "starts_later", "other_weight_version", "mis_sized", "shape_unknown"),
    *("sizes_disagree", "dropped", "not_consumed", "other_adapter"),
}


def check_experts(judge: Judge, answer: dict[str, Any]) -> str | None:
    """Check the experts of ``answer``; return the reason why they are not exact."""
    reason: str | None = answer["routed_experts_reason"]
    inexact = answer["inexact_reason"] if answer["inexact_reason"] != "no_logprobs" else None
    assert answer["experts_exact"] == (reason is None)
    if reason is not None:
        assert answer[EXPERTS] is None
        assert answer["routed_experts_shape"] is None
        assert reason == inexact if inexact is not None else reason in _REASONS
        return reason
    assert inexact is None
    tokens = answer["tokens"]
    rows = rows_in(answer[EXPERTS])
    assert len(rows) == max(0, len(tokens) - 1) == answer["routed_experts_shape"][0]
    if len(rows):
        assert answer["routed_experts_shape"][1:] in ([*SHAPE], [SHAPE[0] * SHAPE[1]])
    wanted: dict[int, list[list[int]]] = {}
    for place, weights in enumerate(_weights(judge, answer)):
        for one in weights - wanted.keys():
            wanted[one] = experts_of(tokens, [one] * len(tokens)).tolist()
        assert rows[place].tolist() in [wanted[one][place] for one in weights], (place, weights, answer)
    return None


def _weights(judge: Judge, answer: dict[str, Any]) -> Iterator[set[int]]:
    """Yield the weights that may have processed each token but the last."""
    tokens: list[int] = answer["tokens"]
    owners = [
        judge.owners.get(logprob) if mask and logprob is not None else None
        for mask, logprob in zip(answer["loss_mask"], answer["rollout_logp"], strict=True)
    ]
    known = [(one, _common(one, tokens)) for one in judge.facts if one.sampled]
    for place in range(len(tokens) - 1):
        following, own = owners[place + 1], owners[place]
        if following is not None:
            fact, number = following
            weights = {fact.weights[number]}
            # The client may have cut the response here: then its own turn has processed the last token of that part.
            if own is not None and own[0] is not fact and own[1] + 1 < len(own[0].weights):
                weights.add(own[0].weights[own[1] + 1])
        else:
            weights = {_processed(one, place) for one, common in known if common > place and _has(one, place)}
        yield weights


def _common(fact: Fact, tokens: Sequence[int]) -> int:
    pairs = enumerate(zip([*fact.consumed, *fact.sampled], tokens, strict=False))
    return next((place for place, (one, other) in pairs if one != other), len(tokens))


def _has(fact: Fact, place: int) -> bool:
    return place < len(fact.consumed) + len(fact.sampled) - 1


def _processed(fact: Fact, place: int) -> int:
    """Return the weights under which ``fact`` has processed its token ``place``: those that sampled the next one."""
    return fact.weights[max(0, place + 1 - len(fact.consumed))]


def check_heard(fact: Fact, meta: dict[str, Any]) -> None:
    """Check the experts that the client of ``fact`` got in ``meta``, of engines that told all that they were asked."""
    if EXPERTS not in meta:
        return
    start = meta[f"{EXPERTS}_start_len"]
    tokens = [*fact.consumed, *fact.sampled][:-1]
    wanted = experts_of(tokens, [_processed(fact, place) for place in range(len(tokens))])
    assert rows_in(meta[EXPERTS]).tolist() == wanted[start:].tolist(), (fact, start)
