"""Holds what a router sent and said against all facts: equal to what the rules demand, or an AssertionError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radix_cache.facts import Anchor, Fact, Row
from radix_cache.scripted import bits

__all__ = ["Judge"]

#: Turns of a session that the cache looks at.
_TURNS_LOOKED_AT = 16


class Judge:
    """``tokenised(before, ids, text)``: whether ``ids`` are what a tokenizer makes of ``text`` behind ``before``."""

    def __init__(self, tokenised: Callable[[list[int], list[int], str], bool]) -> None:
        self.tokenised = tokenised
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
            )
            found = [(anchor.fact, anchor.kept) for anchor in anchors]
        else:
            anchors = self._to_go_on_from(
                fact.session,
                lambda one: list(one.anchors(fact.prompt, reading=False)),
                lambda one: one.prompt != fact.prompt and fact.prompt.startswith(one.prompt),
                known,
            )
            found = [(one.fact, one.kept) for one in anchors if self._leads_to(one, fact)]
        afresh = not self._floor(anchors) and (given or self._is_tokenised([], fact.consumed, fact.prompt))
        fact.comes_from([*found, *([(None, 0)] if afresh else [])])
        assert found or afresh, (fact.prompt, fact.consumed, anchors)
        self.facts.append(fact)

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
    ) -> list[Anchor]:
        """Rule 3 and 6: a session's own, else what it had gone on from, else anybody's; the longest of these."""
        sure = set(self.facts[:known])
        every = [
            anchor._replace(certain=anchor.certain and anchor.fact in sure)
            for fact in self.facts
            for anchor in anchors_of(fact)
        ]
        own = [fact for fact in self.facts if fact.session == session]
        spoken = [fact for fact in own if follows(fact)]
        inherited = set().union(*(fact.ancestors for fact in spoken))
        tiers = [lambda speaker: True]
        if session is not None:
            tiers = [
                lambda speaker: speaker is not None and speaker.session == session,
                lambda speaker: speaker is None or speaker in inherited,
                *tiers,
            ]
        looked_at = not self.evicted and len(own) <= _TURNS_LOOKED_AT
        closed = looked_at and any(fact in sure and fact.sure for fact in spoken)
        found: list[Anchor] = []
        for number, fits in enumerate(tiers):
            if number == 2 and closed:
                break
            if number == 1 and not spoken:
                continue
            tier = []
            for anchor in every:
                speakers = anchor.fact.speakers(anchor.kept)
                if any(map(fits, speakers)):
                    tier.append(anchor._replace(certain=anchor.certain and all(map(fits, speakers))))
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
        every = [anchor for fact in self.facts for anchor in fact.anchors(text, reading=True)]
        certain = [] if self.evicted else [anchor for anchor in every if anchor.certain]
        whole = [anchor for anchor in every if anchor.position == len(text)]
        covered = [anchor for anchor in certain if anchor.position == len(text)]
        if reason in ("cut_inside_token", "uncovered_text", "evicted"):
            assert not covered, (reason, text, covered)
            self._judge_reason(reason, text)
            own = [one for one in every if self._owned(one, session)]
            floor = self._floor([one for one in own if one.certain] or certain)
            unsure = own if not self._floor(own) else []  # recorded or not: they would come first
            self._judge_rest(answer, rows, text, unsure + [one for one in every if one.position >= floor])
            return
        if any(self._owned(one, session) for one in covered):
            assert reason != "other_session", (text, session)
        if reason == "other_session":
            whole = [one for one in whole if not self._owned(one, session)]
        elif session is not None:
            whole = [one for one in whole if self._owned(one, session) or self._of_nobody(one)]
        same = [one for one in whole if self._is(rows, one.fact.records(one.kept))]
        assert same, (reason, text, answer, whole)
        assert (reason == "no_logprobs") == (None in answer["rollout_logp"]) or reason == "other_session"

    def _owned(self, anchor: Anchor, session: str | None) -> bool:
        return any(one is not None and one.session == session for one in anchor.fact.speakers(anchor.kept))

    def _of_nobody(self, anchor: Anchor) -> bool:
        return any(one is None or one.session is None for one in anchor.fact.speakers(anchor.kept))

    def _is(self, rows: list[Row], records: list[list[Row]]) -> bool:
        return any(_same(rows, record) for record in records)

    def _judge_rest(self, answer: dict[str, Any], rows: list[Row], text: str, anchors: list[Anchor]) -> None:
        """What is known as it is known, and behind it the rest of the text as a prompt."""
        matched = answer["matched_length"]
        tokens = [row.token for row in rows]
        records = [
            record
            for anchor in anchors
            if anchor.position == matched
            for record in anchor.fact.records(anchor.kept)
        ]
        for record in [*records, *([[]] if matched == 0 else [])]:
            size = len(record)
            if _same(rows[:size], record) and self._is_tokenised(
                tokens[:size], tokens[size:], text[matched:]
            ):
                assert all(row[1:] == (0, 0.0, -1) for row in rows[size:]), answer
                assert matched or not anchors or self.evicted or not any(one.certain for one in anchors)
                return
        raise AssertionError((text, answer, anchors))

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
            told = [fact for fact in own if fact.sampled and self._is(rows, fact.records(len(fact.sampled)))]
            begun = [  # a client left, so the end was not seen
                fact
                for fact in own
                if not fact.complete
                for kept in range(1, len(fact.sampled))
                if self._is(rows, fact.records(kept))
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


def _same(rows: list[Row], record: list[Row]) -> bool:
    """Equal, logprobs bit for bit."""
    if [row._replace(logprob=None) for row in rows] != [row._replace(logprob=None) for row in record]:
        return False
    pairs = [(one.logprob, other.logprob) for one, other in zip(rows, record, strict=True)]
    return all(
        one is other is None or (one is not None and other is not None and bits([one]) == bits([other]))
        for one, other in pairs
    )
