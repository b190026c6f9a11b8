"""Holds what a router sent against all facts: what the rules demand of it, or an AssertionError.

Whose fact it is counts (rules 15 and 16), for the whole life of a session:

- A session goes on from what it sampled itself. Where it has spoken, it takes of others only what its own requests
  went on from. A request in flight counts, and so does one whose answer contradicted itself. One of which nothing
  came, neither recorded nor in flight, may count or not.
- A session that has lost something takes of others only what its recorded contexts have, wherever it asks.
- Where a session has not spoken and has lost nothing it goes on from anybody's longest context.
- Ids that a client gave are sent for a text of the same session only, or where the tokenizer spells the text so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from radix_cache.machine.facts import Anchor, Asked, Fact

__all__ = ["Judge", "PlacesOfStart"]


class PlacesOfStart(NamedTuple):
    """The first and the last place at which it may begin."""

    first: int
    last: int


class Judge:
    """``tokenised(before, ids, text)``: whether ``ids`` are what a tokenizer makes of ``text`` behind ``before``.

    ``special``: texts that are one token each, inside of which nothing may end that is gone on from. ``evicted``:
    anything may be gone. ``lost``: sessions of which it is certain that something is; of the ``doubted`` it is not.
    ``marked``: some text was lost. ``refused``: what was asked, and not answered; of the sessions that are
    ``forgotten`` a former router knew it.
    """

    def __init__(
        self, tokenised: Callable[[list[int], list[int], str], bool], special: Collection[str] = ()
    ) -> None:
        self.tokenised = tokenised
        self.special = special
        self.facts: list[Fact] = []
        self.evicted = False
        self.lost: set[str] = set()
        self.doubted: set[str] = set()
        self.marked = False
        self.refused: list[Asked] = []
        self.forgotten: set[str | None] = set()
        self.owners: dict[float, tuple[Fact, int]] = {}

    def know(self, fact: Fact) -> None:
        """Remember whose the tokens of ``fact`` are: each has another logprob."""
        self.owners |= {
            row.logprob: (fact, place) for place, row in enumerate(fact.rows) if row.logprob is not None
        }
        if fact.lies:
            self.marked = True

    def restart(self) -> None:
        """Another router goes on: it knows who was not answered, but not what they had asked.

        Of ids that several clients had given it knows the first.
        """
        self.forgotten |= {one.session for one in self.refused} - {None}
        for fact in self.facts:
            fact.gave_first = False

    def take(self, fact: Fact, known: int, *, alone: bool = True) -> None:
        """``fact`` is new; it must have gone on from where the rules say. The first ``known`` facts came before.

        ``alone``: its session asked nothing else meanwhile.
        """
        if fact.asked.given:
            every = [anchor for one in self.facts for anchor in one.given(fact.consumed)]
            anchors = self._to_go_on_from(fact, every, lambda one: len(one.consumed), known, alone)
            found = [(anchor.fact, anchor.kept) for anchor in anchors]
        else:
            every = [
                anchor
                for one in self.facts
                for anchor in self.anchors(one, fact.prompt, reading=False)
                if one.is_usable(fact.session)
            ]
            anchors = self._to_go_on_from(fact, every, lambda one: len(one.prompt), known, alone)
            found = [(one.fact, one.kept) for one in anchors if self._leads_to(one, fact)]
        given = fact.asked.given
        afresh = not self.floor(anchors) and (given or self.is_tokenised([], fact.consumed, fact.prompt))
        fact.comes_from([*found, *([(None, 0)] if afresh else [])])
        assert found or afresh, (fact, anchors, self._own(fact.session), known)
        if given:
            self._look_at_spelling(fact)
            for one, _ in fact.contexts():
                one.givers.add(fact.session)
        self.know(fact)
        self.facts.append(fact)

    def _own(self, session: str | None) -> list[Fact]:
        return [one for one in self.facts if one.session == session]

    def _look_at_spelling(self, fact: Fact) -> None:
        """Given tokens that the tokenizer spells in another way are for their own session's texts."""
        reader = fact.reader

        def is_spelt(ids: list[int], text: str) -> bool:
            return ids == (list(reader.tokenizer.encode(text, add_special_tokens=False)) if text else [])

        each = [
            is_spelt(rest, reader.decode(rest))
            for parent, kept in fact.parents
            for rest in [fact.consumed[len(parent.consumed) + kept if parent is not None else 0 :]]
        ]
        whole = is_spelt(fact.consumed, fact.prompt)
        fact.is_spelt = any(each) or whole
        # The context of given tokens is known by their text, which writes hidden ones out.
        fact.is_surely_spelt = all(each) and (whole or not fact.asked.given)

    def anchors(self, fact: Fact, text: str, *, reading: bool) -> list[Anchor]:
        """Those of ``fact`` at places where a special token is not torn."""
        return [one for one in fact.anchors(text, reading=reading) if not self._tears(text, one.position)]

    def _tears(self, text: str, position: int) -> bool:
        # A special token that begins before the place and ends behind it.
        return any(
            text.find(special, max(0, position - len(special) + 1), position + len(special) - 1) >= 0
            for special in self.special
        )

    def _leads_to(self, anchor: Anchor, fact: Fact) -> bool:
        before = anchor.fact.consumed + anchor.fact.sampled[: anchor.kept]
        size = len(before)
        rest = fact.prompt[anchor.position :]
        return before == fact.consumed[:size] and self.is_tokenised(before, fact.consumed[size:], rest)

    def is_tokenised(self, before: list[int], ids: list[int], text: str) -> bool:
        """True when ``ids`` are what a tokenizer makes of ``text`` behind ``before``."""
        return self.tokenised(before, ids, text) if text else not ids

    def floor(self, anchors: Iterable[Anchor]) -> int:
        """Nothing that ends before may be gone on from."""
        if self.evicted:
            return 0
        return max((anchor.position for anchor in anchors if anchor.certain), default=0)

    def said(self, session: str, anchors: Iterable[Anchor], begins: Callable[[Fact], int]) -> PlacesOfStart:
        """Return where the response may begin that leads a session furthest; a prompt without it is not its own."""
        own = [one for one in anchors if one.kept and one.fact.session == session]
        floor = self.floor(own)
        places = [begins(one.fact) for one in own if one.position >= floor]
        return PlacesOfStart(min(places) if floor else 0, max(places, default=0))

    def continued(self, session: str) -> set[Fact]:
        """Responses that may be in a context in which ``session`` has spoken."""
        return set().union(*(one.ancestors for one in self._own(session)))

    def _to_go_on_from(
        self, fact: Fact, every: list[Anchor], begins: Callable[[Fact], int], known: int, alone: bool
    ) -> list[Anchor]:
        """Rules 3, 6 and 15: a session's own, else what it may take of others; the longest of these."""
        sure = set(self.facts[:known])
        session = fact.session
        every = [
            anchor._replace(certain=anchor.certain and anchor.fact in sure and self._is_sure(anchor, fact))
            for anchor in every
        ]
        if session is None:
            return self._longest(every)
        own = self._longest(list(self._of_its_own(session, every, begins)))
        if self.floor(own):
            return own
        return own + self._longest(list(self._of_others(fact, every, sure, alone)))

    def _is_sure(self, anchor: Anchor, fact: Fact) -> bool:
        return fact.asked.given or anchor.fact.is_usable(fact.session, surely=True)

    def _longest(self, anchors: list[Anchor]) -> list[Anchor]:
        floor = self.floor(anchors)
        return [anchor for anchor in anchors if anchor.position >= floor]

    def _of_its_own(
        self, session: str, every: Iterable[Anchor], begins: Callable[[Fact], int]
    ) -> Iterable[Anchor]:
        """Contexts in which ``session`` was the last to speak."""
        every = list(every)
        said = self.said(session, every, begins)
        for anchor in every:
            speakers = anchor.fact.speakers(anchor.kept)
            own = [one for one in speakers if one is not None and one.session == session]
            if not own:
                continue
            certain = anchor.certain and len(own) == len(speakers)
            if not anchor.kept:
                places = list(map(begins, own))
                if max(places) < said.first:
                    continue
                certain = certain and min(places) >= said.last
            yield anchor._replace(certain=certain)

    def _of_others(
        self, fact: Fact, every: Iterable[Anchor], sure: Collection[Fact], alone: bool
    ) -> Iterable[Anchor]:
        session = fact.session
        assert session is not None
        spoken = [one for one in self._own(session) if _follows(fact, one)]
        known = [one for one in spoken if one.on_record and one in sure]
        is_bound = bool(known) or session in self.lost
        may_be_lost = self.evicted or session in self.lost | self.doubted | self.forgotten
        may_have_spoken = any(
            one.session == session and (one.given or fact.prompt.startswith(one.text)) for one in self.refused
        )
        is_free = not spoken and not may_have_spoken and alone and not may_be_lost
        inherited = self.continued(session)
        surely = set().union(*(one.sure_ancestors for one in known))
        for anchor in every:
            speakers = anchor.fact.speakers(anchor.kept)
            # Nobody here knows what a refused request went on from; that is all that its session may take then.
            if (
                is_bound
                and not may_have_spoken
                and not any(one is None or one in inherited for one in speakers)
            ):
                continue
            certain = is_free or (
                not may_have_spoken
                and all(one is None or one in surely for one in speakers)
                and (not anchor.kept or any(_has(one, anchor) for one in known))
            )
            yield anchor._replace(certain=anchor.certain and certain)


def _has(request: Fact, anchor: Anchor) -> bool:
    """True when ``request`` was made with all tokens of ``anchor``, and not only with the first of them."""
    tokens = anchor.fact.consumed + anchor.fact.sampled[: anchor.kept]
    return request.consumed[: len(tokens)] == tokens


def _follows(fact: Fact, request: Fact) -> bool:
    """True when ``request`` was made on the way of ``fact``."""
    if fact.prompt.startswith(request.prompt):
        return True
    return fact.asked.given and fact.consumed[: len(request.consumed)] == request.consumed
