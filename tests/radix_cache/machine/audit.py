"""Holds what a router says of texts and sessions against all facts: whose they are, complete, and not claimed too much.

For a named session a token has mask 1 only if an exchange of that session sampled it, or the session went on from it.
Where no fact is lost, its own samples have mask 1, and what it may claim as exact is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from radix_cache.machine.facts import Anchor, Fact, Row, is_prompt
from radix_cache.machine.judge import Judge

__all__ = ["Audit"]

_CONTRADICTS = "engine_contradicts_itself"
_UNKNOWN = "unknown_field:"
#: Of these the text is known to its end.
_WHOLE = (None, "no_logprobs", _CONTRADICTS)


class Audit:
    """Checks the router's answers against the facts of ``judge``."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def check_text(self, answer: dict[str, Any], text: str, session: str | None) -> None:
        """``answer`` is what was said of ``text`` when ``session`` asked."""
        rows = rows_of(answer)
        reason = answer["inexact_reason"]
        assert answer["exact"] == (reason is None)
        self._check_owners(rows, session)
        self._check_candidates(answer, text)
        claim = _Claim(self.judge, text, session)
        if reason in _WHOLE or reason.startswith(_UNKNOWN):
            self._check_whole(claim, answer, rows)
            return
        assert reason in ("cut_inside_token", "uncovered_text", "evicted", "other_session"), reason
        assert not claim.certainly_whole, (reason, text, session, claim.certainly_whole)
        self._check_reason(claim, reason)
        if session is None:
            self._check_rest(claim, answer, rows)
        else:
            self._check_own_rest(claim, answer, rows)

    # Ownership of tokens.

    def _check_owners(self, rows: list[Row], session: str | None) -> None:
        """Each token with mask 1 is the session's own, or in what it went on from: no two have the same logprob."""
        owners = self.judge.owners
        continued = self.judge.continued(session) if session is not None else set()
        for row in rows:
            if not row.mask:
                assert row == Row(row.token, 0, 0.0, -1), row
                continue
            if row.logprob is None:
                continue
            fact, place = owners[row.logprob]
            assert fact.rows[place].token == row.token or fact.lies, (row, fact)
            assert session in (None, fact.session) or fact in continued, (row, fact, session)

    def _check_candidates(self, answer: dict[str, Any], text: str) -> None:
        """As many contexts as there ever were, recorded or lost, or at least so many."""
        number, relation = answer["candidates"], answer["candidates_relation"]
        facts, judge = self.judge.facts, self.judge
        assert relation in ("eq", "gte")
        if not judge.evicted and not judge.marked:  # what is lost may be counted more than once
            some = [one for fact in facts for one in fact.anchors(text, reading=True)]
            most = {(one.fact, one.kept) for one in some if one.position == len(text)}
            assert number <= len(most) + sum(one.was_in_flight for one in facts), (text, number, most)
            assert relation == "eq", text
        if relation == "gte":
            return
        known = [
            one
            for fact in facts
            for one in self.judge.anchors(fact, text, reading=True)
            if one.position == len(text) and one.certain
        ]
        least = {(*one.fact.consumed, *one.fact.sampled[: one.kept]) for one in known}
        assert number >= len(least), (text, number, known)

    # All of a text.

    def _check_whole(self, claim: _Claim, answer: dict[str, Any], rows: list[Row]) -> None:
        reason = answer["inexact_reason"]
        tellers = [one for one in claim.may_be_whole if _tells(one.fact, one.kept, rows)]
        if reason == _CONTRADICTS or (reason is not None and not tellers):
            assert any(_begins(one, rows) for one in claim.lies), (claim.text, answer, claim.lies)
            return
        assert tellers, (reason, claim.text, claim.session, answer, claim.may_be_whole)
        fields = [one.fact.fields(one.kept) for one in tellers]
        if reason is None or reason == "no_logprobs":
            assert any(not certain for _, certain in fields), (answer, tellers)
            assert (reason is None) == (None not in answer["rollout_logp"])
        else:
            assert any(reason.removeprefix(_UNKNOWN) in possible for possible, _ in fields), (answer, tellers)

    # Not all of it.

    def _check_reason(self, claim: _Claim, reason: str) -> None:
        judge, text, session = self.judge, claim.text, claim.session
        others = [one for one in claim.whole if _is_of_others(one, session)]
        lies = [one for one in judge.facts if one.lies and text.startswith(one.prompt)]
        if reason == "evicted":
            assert judge.evicted or lies or session in judge.lost | judge.doubted, (text, session)
        elif reason == "other_session":
            assert session is not None
            assert others or lies, (text, session)
        elif reason == "cut_inside_token":
            assert lies or any(
                len(text) > len(fact.prompt)
                and (fact.prompt + fact.reader.read(fact.consumed, fact.sampled, skip)).startswith(text)
                for fact in judge.facts
                for skip in (True, False)
            )
        elif not judge.evicted:
            inside = [
                fact
                for fact in judge.facts
                if fact.complete
                and not fact.lies
                and session in (None, fact.session)
                and len(text) > len(fact.prompt)
                and (fact.prompt + fact.text).startswith(text)
            ]
            assert not inside, (reason, text, inside)
            known = [one for one in others if one.certain and claim.is_surely_usable(one)]
            assert session is None or not known, (reason, text, session, known)

    def _check_rest(self, claim: _Claim, answer: dict[str, Any], rows: list[Row]) -> None:
        """Check that the known part is as some fact has it, and the rest of the text behind it a prompt."""
        anchors = claim.every
        matched = answer["matched_length"]
        floor = self.judge.floor(anchors)
        known = [one for one in anchors if one.position == matched >= floor]
        sizes = [len(one.fact.consumed) + one.kept for one in known if one.fact.tells(rows, one.kept)]
        if matched == 0:
            assert not floor, (claim.text, answer, anchors)
            sizes.append(0)
        assert any(self._is_rest(rows, size, claim.text[matched:]) for size in sizes), (
            claim.text,
            answer,
            anchors,
        )

    def _is_rest(self, rows: list[Row], size: int, text: str) -> bool:
        tokens = [row.token for row in rows]
        return is_prompt(rows[size:], tokens[size:]) and self.judge.is_tokenised(
            tokens[:size], tokens[size:], text
        )

    def _check_own_rest(self, claim: _Claim, answer: dict[str, Any], rows: list[Row]) -> None:
        """Check that the session's own part is as it said, with mask 0 behind it: known of others, or tokenised.

        Others may have gone on from it by ids, which a text spells in another way than its client does.
        """
        floor = self.judge.floor(claim.certainly_own)
        tokens = [row.token for row in rows]
        own = [
            (one.position, len(one.fact.consumed) + one.kept)
            for one in claim.own
            if one.position >= floor and one.fact.tells(rows, one.kept)
        ]
        own += [
            (one.position, len(said.consumed) + kept)
            for one in claim.every
            if one.position >= floor
            for said, kept in one.fact.contexts()
            if said.session == claim.session and said.tells(rows, kept)
        ]
        if not floor:
            own.append((0, 0))
        known = [(one.position, [*one.fact.consumed, *one.fact.sampled[: one.kept]]) for one in claim.every]
        assert any(
            is_prompt(rows[size:], tokens[size:])
            and (
                self._is_rest(rows, size, claim.text[position:])
                or any(
                    position <= place
                    and size <= len(ids)
                    and tokens[: len(ids)] == ids
                    and self._is_rest(rows, len(ids), claim.text[place:])
                    for place, ids in known
                )
            )
            for position, size in own
        ), (claim.text, claim.session, answer, claim.own, claim.every)
        places = {0, *(one.position for one in claim.every)}
        assert answer["matched_length"] in places, (claim.text, answer, places)

    # A session.

    def check_session(self, document: dict[str, Any], session: str) -> None:
        """``document`` has the leaves of a session: its own responses, and none is missing of a complete one."""
        judge = self.judge
        own = [fact for fact in judge.facts if fact.session == session]
        told: set[Fact] = set()
        for record in document["trajectories"]:
            told |= self._check_record(record, own, session)
        complete = document["complete"]
        assert not (complete and session in judge.lost), session
        before: set[Fact] = set().union(*(fact.ancestors - {fact} for fact in own))
        missing = [fact for fact in own if fact.complete and fact not in before and fact not in told]
        assert not missing or (judge.evicted and not complete), (session, missing)
        if not complete:
            assert judge.evicted or session in judge.lost or session in judge.doubted, session
            judge.lost.add(session)  # for ever

    def _check_record(self, record: dict[str, Any], own: list[Fact], session: str) -> set[Fact]:
        rows = rows_of(record)
        reason = record["inexact_reason"]
        assert record["exact"] == (reason is None)
        assert record["prompt"] + record["response"] == record["text"]
        self._check_owners(rows, session)
        self._check_candidates(record, record["text"])
        told = [fact for fact in own if not fact.lies and _tells(fact, len(fact.sampled), rows)]
        # A client left, so the end was not seen; or what came before an attempt that contradicted itself; or the end
        # had to go, when another request went on from what was streamed before.
        begun = [
            fact
            for fact in own
            if not fact.complete or reason == "evicted"
            for kept in range(1, len(fact.sampled))
            if _tells(fact, kept, rows)
        ]
        if not told and not begun:  # what it consumed is known, whatever it says of the rest
            assert any(fact.lies and _begins(fact, rows) for fact in own), (session, record)
            assert reason is not None, (session, record)
            return set()
        if reason == "evicted":
            assert self.judge.evicted
            return set(told)
        fields = [fact.fields(len(fact.sampled)) for fact in (*told, *begun)]
        if reason is None or reason == "no_logprobs":
            assert any(not certain for _, certain in fields), record
            assert (reason is None) == (None not in record["rollout_logp"])
        else:
            name = reason.removeprefix(_UNKNOWN)
            assert reason.startswith(_UNKNOWN), record
            assert any(name in possible for possible, _ in fields), record
        return set(told)


class _Claim:
    """The claims that ``text`` allows for ``session``, and those that it demands.

    ``own``: what the session said or went on from, and so did ``certainly_own``. ``may_be_whole``: all of the text,
    in its name. ``certainly_whole``: no less than that. ``whole``: all of the text, in anybody's name. ``prompts``: the
    same, where nobody has sampled anything.
    """

    def __init__(self, judge: Judge, text: str, session: str | None) -> None:
        self.text = text
        self.session = session
        self._judge = judge
        self.every = [
            one
            for fact in judge.facts
            if session is None or fact.is_usable(session)
            for one in judge.anchors(fact, text, reading=True)
        ]
        self.whole = [one for one in self.every if one.position == len(text)]
        self.lies = [
            one
            for one in judge.facts
            if one.lies and text.startswith(one.prompt) and session in (None, one.session)
        ]
        self.prompts: list[Anchor] = []
        if session is None:
            self.own, self.may_be_whole = self.every, self.whole
            self.certainly_own = [one for one in self.every if self.is_surely_usable(one)]
        else:
            self._divide(session)
        surely = [] if judge.evicted else self.certainly_own + self.prompts
        self.certainly_whole = [one for one in surely if one.certain and one.position == len(text)]

    def _divide(self, session: str) -> None:
        judge = self._judge
        continued = judge.continued(session)
        said = judge.said(session, self.every, lambda one: len(one.prompt))
        self.own = [
            one
            for one in self.every
            if one.fact.session == session
            or one.fact in continued
            or any(said is not None and said.session == session for said in one.fact.speakers(one.kept))
        ]
        self.certainly_own = [
            one
            for one in self.own
            if one.fact.session == session and (one.kept or _all_of(one, session, said.last))
        ]
        nobodys = [one for one in self.whole if not one.kept and None in one.fact.speakers(0)]
        if session in judge.lost:
            nobodys = [one for one in nobodys if one.fact.session == session]
        if judge.floor(self.certainly_own):  # a prompt without its samples is not what it said
            self.own = [one for one in self.own if one.fact.speakers(one.kept) != {None}]
        whole = [one for one in self.own if one.position == len(self.text)]
        if judge.floor(self.certainly_own) == len(self.text):
            self.may_be_whole = [one for one in whole if _is_by(session, one)]
        else:
            self.may_be_whole = whole + nobodys
        if not any(one.kept and one.fact.session == session for one in self.every):
            self.prompts = [
                one
                for one in nobodys
                if one.fact.speakers(0) == {None}
                and (
                    one.fact.session == session or session not in judge.lost | judge.doubted | judge.forgotten
                )
                and one.fact.is_usable(session, surely=True)
            ]

    def is_surely_usable(self, anchor: Anchor) -> bool:
        """True when no spelling of another client is in the way."""
        return anchor.fact.is_usable(self.session, surely=True)


def _all_of(anchor: Anchor, session: str, since: int) -> bool:
    """True when ``session`` was the last to speak before a prompt, ``since`` a place in the text or later."""
    return all(
        one is not None and one.session == session and len(one.prompt) >= since
        for one in anchor.fact.speakers(anchor.kept)
    )


def _is_of_others(anchor: Anchor, session: str | None) -> bool:
    """True when another session may have sampled the last response, or was asked this."""
    return anchor.fact.session != session or any(
        one is not None and one.session != session for one in anchor.fact.speakers(anchor.kept)
    )


def _is_by(session: str, anchor: Anchor) -> bool:
    """True when ``session`` may have sampled the last response."""
    return any(one is not None and one.session == session for one in anchor.fact.speakers(anchor.kept))


def _tells(fact: Fact, kept: int, rows: list[Row]) -> bool:
    return len(rows) == len(fact.consumed) + kept and fact.tells(rows, kept)


def _begins(fact: Fact, rows: list[Row]) -> bool:
    """True when ``rows`` begin with what ``fact`` consumed, in a sample of its adapter."""
    return len(rows) >= len(fact.consumed) and fact.tells(rows, 0, adapter=fact.asked.adapter)


def rows_of(answer: dict[str, Any]) -> list[Row]:
    columns: Iterable[list[Any]] = (
        answer["tokens"],
        answer["loss_mask"],
        answer["rollout_logp"],
        answer["generation_versions"],
    )
    columns = list(columns)
    assert {len(column) for column in columns} == {answer["token_length"]} == {answer["loss_mask_length"]}
    return [Row(*values) for values in zip(*columns, strict=True)]
