"""Comparison of the router's trajectories with the engines' journals.

A journal is an embedded engine's own list of its requests. Its entries have the tokens that the engine got and sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_demo.conversations import Conversation

__all__ = ["Difference", "Verdict", "expected", "judge"]

Entry = Mapping[str, Any]
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]

#: Version of a token that no engine sampled.
_PROMPT = -1


@dataclass(frozen=True, slots=True)
class Difference:
    """The first ``position`` at which the retokenised text of ``session`` has another id.

    ``sampled`` and ``retokenised`` have the ids from this position to the end.
    """

    session: str
    position: int
    sampled: list[int]
    retokenised: list[int]


@dataclass(slots=True)
class Verdict:
    """The result over all conversations."""

    trajectories: int = 0
    exact: int = 0
    turns: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    corrupted: int = 0
    corrupted_by_turn: Counter[int] = field(default_factory=Counter)
    example: Difference | None = None
    tokens_by_version: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    naive_tokens: int = 0


def expected(turns: Sequence[Entry], decode: Decode) -> dict[str, list[Any]]:
    """Return the right fields of ``/retrieve_from_text``, from the journal entries of a conversation's turns in order.

    The last turn's context is the whole conversation. ``decode`` gives the text of token ids. Raises ValueError when
    the last turn's context does not contain an earlier turn.
    """
    last = turns[-1]
    tokens: list[int] = [*last["input_ids"], *last["output_ids"]]
    mask, logp, versions = [0] * len(tokens), [0.0] * len(tokens), [_PROMPT] * len(tokens)
    for turn in turns:
        start = len(turn["input_ids"])
        end = start + _kept(turn, tokens[start:], decode)
        if tokens[:start] != turn["input_ids"]:
            raise ValueError(f"the last turn does not begin with the prompt tokens of {turn['rid']}")
        mask[start:end] = [1] * (end - start)
        logp[start:end] = turn["output_logprobs"][: end - start]
        versions[start:end] = turn["output_versions"][: end - start]
    return {"tokens": tokens, "loss_mask": mask, "rollout_logp": logp, "generation_versions": versions}


def _kept(turn: Entry, later: Sequence[int], decode: Decode) -> int:
    """Count the tokens sampled in ``turn`` that ``later`` keeps: all, or all but a tail that the turn's text lacks.

    A model may end with ``<|endoftext|>`` where the template has ``<|im_end|>``, and the length limit may cut a
    character. Each of these leaves such a tail. Raises ValueError when other tokens were not kept.
    """
    sampled = turn["output_ids"]
    pairs = zip(sampled, later, strict=False)
    count = next(
        (place for place, (one, two) in enumerate(pairs) if one != two), min(len(sampled), len(later))
    )
    if count < len(sampled) and decode(sampled[:count]) != turn["text"]:
        raise ValueError(f"the tokens sampled in {turn['rid']} were not kept")
    return count


def judge(
    conversations: Sequence[Conversation],
    retrieved: Mapping[str, Mapping[str, Any]],
    journal: Mapping[str, Entry],
    encode: Encode,
    decode: Decode,
) -> Verdict:
    """Compare ``retrieved`` (by session) with ``journal`` (by rid), and with tokenising the text again."""
    verdict = Verdict()
    for conversation in conversations:
        session, said = conversation.session, retrieved[conversation.session]
        turns = [journal[rid] for rid in conversation.rids]
        verdict.trajectories += 1
        verdict.turns += len(turns)
        wrong = _wrong(said, turns, decode)
        if wrong is None:
            verdict.exact += 1
        else:
            verdict.wrong[session] = wrong
        tokens = list(said["tokens"])
        verdict.tokens += len(tokens)
        verdict.trained_tokens += sum(said["loss_mask"])
        versions = zip(said["generation_versions"], said["loss_mask"], strict=False)
        verdict.tokens_by_version.update(str(version) for version, trained in versions if trained)
        verdict.naive_tokens += sum(len(encode(prompt)) for prompt in conversation.prompts)
        for number, (prompt, turn) in enumerate(zip(conversation.prompts, turns, strict=True), 1):
            truth = [*turn["input_ids"], *turn["output_ids"]]
            verdict.corrupted_by_turn[number] += _is_corrupted(truth, encode(prompt + turn["text"]))
        again = encode(conversation.text)
        if _is_corrupted(tokens, again):
            verdict.corrupted += 1
            if verdict.example is None:
                verdict.example = _difference(session, tokens, again)
    return verdict


def _is_corrupted(tokens: Sequence[int], again: Sequence[int]) -> bool:
    """Return True when ``again``, which is the text of ``tokens`` tokenised again, differs from ``tokens``.

    The text does not show the last end token, so a missing end token does not count.
    """
    return list(again) != list(tokens[: len(again)]) or len(tokens) - len(again) > 1


def _wrong(said: Mapping[str, Any], turns: Sequence[Entry], decode: Decode) -> str | None:
    if not said["exact"]:
        return f"not exact: {said.get('inexact_reason')}"
    try:
        for key, value in expected(turns, decode).items():
            if list(said[key]) != value:
                return f"{key} differ from the journal"
    except ValueError as error:
        return str(error)
    return None


def _difference(session: str, sampled: list[int], again: list[int]) -> Difference:
    pairs = enumerate(zip(sampled, again, strict=False))
    position = next((place for place, (one, two) in pairs if one != two), min(len(sampled), len(again)))
    return Difference(session, position, sampled[position:], again[position:])
