"""One session as the viewer shows it: its turns as a tree, and the tokens of one branch.

A branch is a turn together with all turns that it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

from slime_dashboard.trajectory_pieces import Piece
from slime_dashboard.trajectory_reasons import experts_words, reason_words

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionTurns, Turn, TurnContext

__all__ = ["Span", "branch_of", "page_of", "spans_of", "tree_of"]

#: The weight version of tokens that no engine sampled for this session.
_PROMPT = -1
_EXPERTS = "routed_experts"
#: A reason that leaves routed experts exact: a token without a logprob still has its experts.
_HARMLESS = "no_logprobs"
#: Number of tokens that the tree shows of a turn's answer, from the beginning of the answer.
_PREVIEW = 24


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``end`` of a branch, for which all other fields are the same.

    ``role``: ``prompt`` (the router or the client made these tokens), ``sampled`` (the answer at the branch's end), or
    ``reused`` (an earlier answer; each later turn of the branch sent these tokens again). ``turn``: the turn that
    sampled or sent them first; None for an answer of another session. ``mask``: the loss mask. ``version``: the weight
    version; None if the engine gave none, or if the mask is 0.
    """

    start: int
    end: int
    role: str
    turn: int | None
    mask: int
    version: str | None


def tree_of(source: SessionTurns, turns: Sequence[Turn], newest: int) -> dict[str, Any]:
    """Return the last turns, at most ``newest``, each with the number of the turn that it continues.

    O(tokens of the leaves among these turns).
    """
    continued = {turn.before for turn in turns}
    prompts: dict[Hashable, int] = {}
    leaves = [turn for turn in turns if turn.number not in continued]
    shown: dict[int, dict[str, Any]] = {}
    for leaf in reversed(leaves):
        if leaf.number < len(turns) - newest:
            break
        context = source.context(leaf, turns)
        for about in _turns_in(source, context, turns):
            about["prompt"] = prompts.setdefault(turns[about["number"]].prompt, len(prompts))
            known = shown.setdefault(about["number"], about)
            known["kept"] = max(known["kept"], about["kept"])
        if leaf.number in shown:  # the leaf has at least one token
            shown[leaf.number]["inexact_reason"] = _reason(context)
            shown[leaf.number]["is_leaf"] = True
    rows = [shown[number] for number in sorted(shown)]
    return {"turns": rows[-newest:], "turn_count": len(turns), "leaf_count": len(leaves)}


def _turns_in(source: SessionTurns, context: TurnContext, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    before = 0
    for number, start, end, _ in context.spans:
        turn = turns[number]
        ids = context.record.tokens[start : min(end, start + _PREVIEW)].tolist()
        yield {
            "number": number,
            "before": turn.before,
            "start": start,
            "prompt_tokens": start - before,
            "tokens": turn.tokens,
            "kept": end - start,
            "finish": (turn.finish_reason or {}).get("type"),
            "versions": list(dict.fromkeys(_versions(context, start, end))),
            "preview": source.spell(ids),
            "is_leaf": False,
            "inexact_reason": None,
        }
        before = end


def _versions(context: TurnContext, start: int, end: int) -> Iterator[str | None]:
    place = 0
    for version, count in context.record.spans:
        if place < end and place + count > start and not isinstance(version, int):
            yield version
        place += count


def _reason(context: TurnContext) -> dict[str, str] | None:
    reason = context.inexact_reason
    return {"code": reason, "words": reason_words(reason)} if reason is not None else None


def branch_of(source: SessionTurns, turn: Turn, context: TurnContext) -> dict[str, Any]:
    """Return facts about the context of ``turn``, without its tokens."""
    spans = list(spans_of(turn, context))
    counts = dict.fromkeys(("prompt", "sampled", "reused", "trained"), 0)
    for span in spans:
        counts[span.role] += span.end - span.start
        counts["trained"] += (span.end - span.start) * span.mask
    length = len(context.record.tokens)
    return {
        "turn": turn.number,
        "tokens": length,
        "exact": context.inexact_reason is None,
        "inexact_reason": _reason(context),
        "experts": _experts(source, turn, context, length),
        "finish_reason": turn.finish_reason,
        "counts": counts,
        "spans": [asdict(span) for span in spans],
    }


def _experts(source: SessionTurns, turn: Turn, context: TurnContext, length: int) -> dict[str, Any] | None:
    """Return whether the routed experts are exact, and if not, why; None if no plugin records routed experts."""
    found = source.rows(_EXPERTS, turn, length)
    if found is None:
        return None
    reason = context.inexact_reason
    if reason is not None and reason != _HARMLESS:
        found = reason
    if isinstance(found, str):
        return {"exact": False, "code": found, "words": experts_words(found), "shape": None}
    return {"exact": True, "code": None, "words": None, "shape": list(found.shape)}


def spans_of(turn: Turn, context: TurnContext) -> Iterator[Span]:
    """Yield the spans of the context of ``turn``, in order, without gaps."""
    own = {start: number for number, start, _, _ in context.spans}
    starts = sorted(own)
    length = len(context.record.tokens)
    place = at = 0
    for _, start, end in (*context.sampled, (None, length, length)):
        while at < len(starts) and starts[at] < start:
            at += 1
        asking = own[starts[at]] if at < len(starts) else turn.number
        yield from _split(context, place, start, "prompt", asking)
        role = "sampled" if end == length and own.get(start) == turn.number else "reused"
        yield from _split(context, start, end, role, own.get(start))
        place = end


def _split(context: TurnContext, start: int, end: int, role: str, turn: int | None) -> Iterator[Span]:
    """Yield a span for each run of one weight version between ``start`` and ``end``."""
    place = 0
    for version, count in context.record.spans:
        first, last = max(start, place), min(end, place + count)
        if first < last:
            trained = version != _PROMPT
            known = version if isinstance(version, str) else None
            yield Span(first, last, role, turn, int(trained), known)
        place += count


def page_of(
    context: TurnContext, start: int, end: int, piece: Callable[[int], Piece] | None
) -> dict[str, Any]:
    """Return tokens ``start`` to ``end`` of ``context`` as columns. Without ``piece`` there are no texts.

    ``texts``: None where a token's bytes are no UTF-8, or not known. ``bytes``: the bytes that are no UTF-8, in
    hexadecimal, by place in the page.
    ``logprobs``: None where the loss mask is 0, or the engine gave none.
    """
    record = context.record
    ids = record.tokens[start:end].tolist()
    mask = record.loss_mask[start:end].tolist()
    logprobs = [
        one if trained and not isnan(one) else None
        for one, trained in zip(record.logprobs[start:end].tolist(), mask, strict=True)
    ]
    pieces = [piece(one) if piece is not None else Piece(None, None) for one in ids]
    return {
        "start": start,
        "total": len(record.tokens),
        "ids": ids,
        "logprobs": logprobs,
        "texts": [one.text for one in pieces],
        "bytes": {
            str(place): one.raw.hex() for place, one in enumerate(pieces) if one.text is None and one.raw
        },
    }
