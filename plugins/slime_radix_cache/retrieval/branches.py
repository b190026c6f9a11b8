"""The leaves of a session's tree of responses, and the prefixes that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from slime_radix_cache.index.losses import Count
from slime_radix_cache.index.segments import Response, Segment, links
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.retrieval.answer import Answer, about_record, reason_of_record, record_of

__all__ = ["Branch", "Shared", "answer_of", "branches", "continued_in"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A prefix that a branch shares with the earlier branch ``index``: the first ``tokens`` tokens of both."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Branch:
    """One leaf: a response that no kept response of its session continues, with everything before it.

    ``text``: the whole text in UTF-8, as a client saw it. ``prompt_bytes`` and ``prompt_tokens`` count the part before
    the first sampled token; ``prompt_bytes`` is None if ``text`` does not begin with the text of that part.
    ``parent``: the longest prefix shared with an earlier branch; None for the first branch of a tree.
    ``candidates``: number of contexts that ``text`` may stand for, lost contexts included. ``cut_short``: the session
    continued the leaf, and the next response is lost.
    """

    leaf: Response
    tokens: int
    text: bytes
    prompt_bytes: int | None
    prompt_tokens: int
    parent: Shared | None
    candidates: Count
    cut_short: bool


def branches(
    responses: Sequence[Response],
    candidates: Callable[[bytes], Count],
    longer: Mapping[Response, Response],
) -> list[Branch]:
    """Return the branches of ``responses``: all responses of one session, oldest first. O(segments and text).

    A continued response is no leaf, even if the client kept only a part of it (at least one token). If a response was
    recorded first only in part, the partial record is a leaf only if the session continued it and the next response is
    lost. ``candidates(text)`` counts the contexts that ``text`` may stand for. ``longer``: see
    :meth:`Trajectories.longer_of`.
    """
    continued = continued_in(responses)
    continued |= {whole for part, whole in longer.items() if part in continued}
    seen: dict[Segment, list[tuple[int, int]]] = {}
    found: list[Branch] = []
    for leaf in responses:
        is_part = leaf in longer and not leaf.continuation_lost
        if leaf not in continued and not is_part:
            found.append(_branch(leaf, len(found), seen, candidates))
    return found


def continued_in(responses: Sequence[Response]) -> set[Segment]:
    """Return each segment that one of ``responses`` continues, directly or not, with at least one token kept."""
    continued: set[Segment] = set()
    for response in responses:
        before = (response.parent, response.kept) if response.parent is not None else None
        for segment, kept in links(before):
            if segment in continued:
                break  # everything before it is in the set already
            if kept:
                continued.add(segment)
    return continued


def _branch(
    leaf: Response,
    index: int,
    seen: dict[Segment, list[tuple[int, int]]],
    candidates: Callable[[bytes], Count],
) -> Branch:
    """Return the branch of ``leaf``.

    ``seen``: for each segment, the earlier branches that have it, each with the number of its tokens in that branch.
    """
    chain = list(links((leaf, len(leaf))))
    position = sum(length for _, length in chain)
    parent = None
    first, prompt_tokens = leaf, position - len(leaf)
    for segment, length in chain:
        position -= length
        if parent is None and segment in seen:
            other, common = max(
                ((other, min(length, its)) for other, its in seen[segment]), key=lambda pair: pair[1]
            )
            parent = Shared(other, position + common)
        seen.setdefault(segment, []).append((index, length))
        if isinstance(segment, Response) and length:
            first, prompt_tokens = segment, position
    text = text_of(leaf.node)
    prompt_bytes = first.start if text.startswith(text_of(first.node)[: first.start]) else None
    return Branch(
        leaf,
        sum(length for _, length in chain),
        text,
        prompt_bytes,
        prompt_tokens,
        parent,
        candidates(text),
        leaf.continuation_lost,
    )


def answer_of(branch: Branch, spell: Callable[[Sequence[int]], str]) -> Answer:
    """Return the record of ``branch``, as documented for ``/trajectories``. O(its tokens); safe in any thread.

    ``spell`` decodes tokens. It is called if the branch's text does not begin with the prompt's text.
    """
    leaf = branch.leaf
    context = leaf, len(leaf)
    record = record_of(context, session=leaf.session)
    reason = "evicted" if branch.cut_short else reason_of_record(context, has_logprobs=record.has_logprobs)
    text = branch.text.decode()
    if branch.prompt_bytes is not None:
        prompt = branch.text[: branch.prompt_bytes].decode()
    else:
        prompt = spell(record.tokens[: branch.prompt_tokens].tolist())
    begins = text.startswith(prompt)  # False if sampling began inside a character
    response = text[len(prompt) :] if begins else spell(record.tokens[branch.prompt_tokens :].tolist())
    about = {
        **about_record(record, reason, len(text), branch.candidates),
        "text": text,
        "prompt": prompt,
        "prompt_length": branch.prompt_tokens,
        "response": response,
        "response_length": branch.tokens - branch.prompt_tokens,
        "finish_reason": orjson.loads(leaf.finish_reason),
        "parent": asdict(branch.parent) if branch.parent is not None else None,
        "weight_versions": record.weight_versions(),
    }
    return Answer(record, about)
