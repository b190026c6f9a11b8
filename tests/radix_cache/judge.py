"""Holds what a router sent and said against all facts: equal to what the rules demand, or an AssertionError."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from radix_cache.facts import Anchor, Fact, Row, is_prompt

__all__ = ["Judge"]

#: Turns of a session that the cache looks at.
_TURNS_LOOKED_AT = 16


class _Said(NamedTuple):
    """The first and the last place at which it may begin."""

    first: int
    last: int


class Judge:
    """``tokenised(before, ids, text)``: whether ``ids`` are what a tokenizer makes of ``text`` behind ``before``.

    ``special``: texts that are one token each, inside of which nothing may end that is gone on from.
    """

    def __init__(
        self, tokenised: Callable[[list[int], list[int], str], bool], special: Collection[str] = ()
    ) -> None:
        self.tokenised = tokenised
        self.special = special
        self.facts: list[Fact] = []
        self.evicted = False

    # What was sent.

    def take(self, fact: Fact, known: int, given: bool) -> None:
        """``fact`` is new; it must have gone on from where the rules say. The first ``known`` facts came before."""
        if given:
            anchors = self._to_go_on_from(
                fact.session,
                lambda one: list(one.given(fact.consumed)),
                lambda one: (
                    len(one.consumed) < len(fact.consumed)
                    and fact.consumed[: len(one.consumed)] == one.consumed
                ),
                known,
                lambda one: len(one.consumed),
            )
            found = [(anchor.fact, anchor.kept) for anchor in anchors]
        else:
            anchors = self._to_go_on_from(
                fact.session,
                lambda one: self._anchors(one, fact.prompt, reading=False),
                lambda one: one.prompt != fact.prompt and fact.prompt.startswith(one.prompt),
                known,
                lambda one: len(one.prompt),
            )
            found = [(one.fact, one.kept) for one in anchors if self._leads_to(one, fact)]
        afresh = not self._floor(anchors) and (given or self._is_tokenised([], fact.consumed, fact.prompt))
        fact.comes_from([*found, *([(None, 0)] if afresh else [])])
        assert found or afresh, (
            fact,
            anchors,
            [one for one in self.facts if one.session == fact.session],
            known,
        )
        self.facts.append(fact)

    def _said(self, session: str, anchors: Iterable[Anchor], begins: Callable[[Fact], int]) -> _Said:
        """Where the response may begin that leads a session furthest; a prompt without it is not its own."""
        own = [one for one in anchors if one.kept and one.fact.session == session]
        floor = self._floor(own)
        places = [begins(one.fact) for one in own if one.position >= floor]
        return _Said(min(places) if floor else 0, max(places, default=0))

    def _anchors(self, fact: Fact, text: str, *, reading: bool) -> list[Anchor]:
        return [one for one in fact.anchors(text, reading=reading) if not self._tears(text, one.position)]

    def _tears(self, text: str, position: int) -> bool:
        return any(
            text.startswith(special, position - before)
            for special in self.special
            for before in range(1, min(len(special), position + 1))
        )

    def _leads_to(self, anchor: Anchor, fact: Fact) -> bool:
        before = anchor.fact.consumed + anchor.fact.sampled[: anchor.kept]
        size = len(before)
        rest = fact.prompt[anchor.position :]
        return before == fact.consumed[:size] and self._is_tokenised(before, fact.consumed[size:], rest)

    def _is_tokenised(self, before: list[int], ids: list[int], text: str) -> bool:
        return self.tokenised(before, ids, text) if text else not ids

    def _floor(self, anchors: Iterable[Anchor]) -> int:
        """Nothing that ends before may be gone on from."""
        if self.evicted:
            return 0
        return max((anchor.position for anchor in anchors if anchor.certain), default=0)

    def _to_go_on_from(
        self,
        session: str | None,
        anchors_of: Callable[[Fact], list[Anchor]],
        follows: Callable[[Fact], bool],
        known: int,
        begins: Callable[[Fact], int],
    ) -> list[Anchor]:
        """Rules 3 and 6: a session's own, else what it had gone on from, else anybody's; the longest of these.

        With each tier goes whether it is certain to be looked at: the cache looks at a session's latest turns only.
        """
        sure = set(self.facts[:known])
        every = [
            anchor._replace(certain=anchor.certain and anchor.fact in sure)
            for fact in self.facts
            for anchor in anchors_of(fact)
        ]
        own = [fact for fact in self.facts if fact.session == session]
        spoken = [fact for fact in own if follows(fact)]
        inherited = set().union(*(fact.ancestors for fact in spoken))
        sure_inherited = set().union(*(one.sure_ancestors for one in spoken if one.sure and one in sure))
        has_spoken = any(fact in sure and fact.sure for fact in spoken) and len(own) <= _TURNS_LOOKED_AT

        def inherits(speaker: Fact | None) -> bool:
            return speaker is None or speaker in inherited

        tiers: list[tuple[Callable[[Fact | None], bool], bool]]
        tiers = [(lambda speaker: True, session is None or not spoken)]
        if session is not None:
            tiers.insert(0, (lambda speaker: speaker is not None and speaker.session == session, True))
        if session is not None and spoken:
            tiers.insert(1, (inherits, has_spoken))
            if has_spoken and not self.evicted:
                del tiers[2]
        found: list[Anchor] = []
        said = self._said(session, every, begins) if session is not None else None
        for fits, surely in tiers:
            tier = []
            for anchor in every:
                speakers = anchor.fact.speakers(anchor.kept)
                if any(map(fits, speakers)):
                    certain = anchor.certain and surely and all(map(fits, speakers))
                    if fits is inherits:
                        certain = certain and all(one is None or one in sure_inherited for one in speakers)
                    if said is not None and fits is tiers[0][0] and not anchor.kept:
                        places = [begins(one) for one in speakers if one is not None and fits(one)]
                        if max(places) < said.first:
                            continue
                        certain = certain and min(places) >= said.last
                    tier.append(anchor._replace(certain=certain))
            floor = self._floor(tier)
            found += [anchor for anchor in tier if anchor.position >= floor]
            if floor:
                break
        return found

    # What was said.

    def judge(self, answer: dict[str, Any], text: str, session: str | None) -> None:
        """``answer`` is what was said of ``text``."""
        rows = rows_of(answer)
        reason = answer["inexact_reason"]
        assert answer["exact"] == (reason is None)
        every = [anchor for fact in self.facts for anchor in self._anchors(fact, text, reading=True)]
        certain = [] if self.evicted else [anchor for anchor in every if anchor.certain]
        whole = [anchor for anchor in every if anchor.position == len(text)]
        covered = [anchor for anchor in certain if anchor.position == len(text)]
        said = self._said(session, every, lambda one: len(one.prompt)) if session is not None else None
        if reason in ("cut_inside_token", "uncovered_text", "evicted"):
            assert not covered, (reason, text, covered)
            self._judge_reason(reason, text)
            own = [one for one in every if self._owned(one, session, said)]
            surely = [one for one in own if self._owned(one, session, said, surely=True)]
            floor = self._floor([one for one in surely if one.certain] or certain)
            unsure = own if not self._floor(surely) else []  # recorded or not: they would come first
            self._judge_rest(answer, rows, text, unsure + [one for one in every if one.position >= floor])
            return
        if any(self._owned(one, session, said, surely=True) for one in covered):
            assert reason != "other_session", (text, session)
        if reason == "other_session":
            whole = [one for one in whole if not self._owned(one, session, said, surely=True)]
        elif session is not None:
            whole = [one for one in whole if self._owned(one, session, said) or self._of_nobody(one)]
        assert any(self._tells(one.fact, one.kept, rows) for one in whole), (reason, text, answer, whole)
        assert (reason == "no_logprobs") == (None in answer["rollout_logp"]) or reason == "other_session"

    def _owned(
        self, anchor: Anchor, session: str | None, said: _Said | None, *, surely: bool = False
    ) -> bool:
        since = 0 if said is None or anchor.kept else said.last if surely else said.first
        return (all if surely else any)(
            one is not None and one.session == session and len(one.prompt) >= since
            for one in anchor.fact.speakers(anchor.kept)
        )

    def _of_nobody(self, anchor: Anchor) -> bool:
        return any(one is None or one.session is None for one in anchor.fact.speakers(anchor.kept))

    def _tells(self, fact: Fact, kept: int, rows: list[Row]) -> bool:
        return len(rows) == len(fact.consumed) + kept and fact.tells(rows, kept)

    def _judge_rest(self, answer: dict[str, Any], rows: list[Row], text: str, anchors: list[Anchor]) -> None:
        """What is known as it is known, and behind it the rest of the text as a prompt."""
        matched = answer["matched_length"]
        tokens = [row.token for row in rows]
        known = [(one.fact, one.kept) for one in anchors if one.position == matched]
        sizes = [len(fact.consumed) + kept for fact, kept in known if fact.tells(rows, kept)]
        if matched == 0:
            assert not self._floor(anchors), (text, answer, anchors)
            sizes.append(0)
        assert any(
            is_prompt(rows[size:], tokens[size:])
            and self._is_tokenised(tokens[:size], tokens[size:], text[matched:])
            for size in sizes
        ), (text, answer, anchors)

    def _judge_reason(self, reason: str, text: str) -> None:
        if reason == "evicted":
            assert self.evicted
        elif reason == "cut_inside_token":
            assert any(
                len(text) > len(fact.prompt)
                and (fact.prompt + fact.reader.read(fact.consumed, fact.sampled, skip)).startswith(text)
                for fact in self.facts
                for skip in (True, False)
            )
        elif not self.evicted:
            inside = [
                fact
                for fact in self.facts
                if fact.complete
                and len(text) > len(fact.prompt)
                and (fact.prompt + fact.text).startswith(text)
            ]
            assert not inside, (reason, text, inside)

    def judge_session(self, records: list[dict[str, Any]], session: str) -> None:
        """``records`` are the leaves of a session: responses of its own, and none is missing that it ended with."""
        own = [fact for fact in self.facts if fact.session == session]
        leaves = []
        for record in records:
            rows = rows_of(record)
            told = [fact for fact in own if self._tells(fact, len(fact.sampled), rows)]
            begun = [  # a client left, so the end was not seen
                fact
                for fact in own
                if not fact.complete
                for kept in range(1, len(fact.sampled))
                if self._tells(fact, kept, rows)
            ]
            assert told or begun, (session, record)
            assert record["prompt"] + record["response"] == record["text"]
            leaves += told
        if self.evicted:
            return
        parents = {parent for fact in self.facts for parent, kept in fact.parents if kept}
        missing = [fact for fact in own if fact.complete and fact not in parents and fact not in leaves]
        assert not missing, (session, missing)


def rows_of(answer: dict[str, Any]) -> list[Row]:
    columns = (answer["tokens"], answer["loss_mask"], answer["rollout_logp"], answer["generation_versions"])
    assert {len(column) for column in columns} == {answer["token_length"]} == {answer["loss_mask_length"]}
    return [Row(*values) for values in zip(*columns, strict=True)]
