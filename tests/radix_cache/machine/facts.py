"""Facts: the tokens consumed and sampled, as an engine's journal has them; answers are compared with this model.

It knows every fact, and which places in its text a later text may go on from. It knows nothing of trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radix_cache.machine.adversary import Attempt
from radix_cache.machine.lies import NOTHING_LEFT
from radix_cache.machine.reading import Detokenizer, finish_reason

__all__ = ["Anchor", "Asked", "Fact", "Row", "facts_of", "goes_on", "is_prompt"]


class Row(NamedTuple):
    """The right row of one token in an answer."""

    token: int
    mask: int
    logprob: float | None
    version: str | int | None


class Anchor(NamedTuple):
    """After ``position`` characters of a text it is known what was consumed: ``kept`` tokens of what ``fact`` sampled.

    ``certain``: known beyond doubt, so nothing shorter will do.
    """

    position: int
    fact: Fact
    kept: int
    certain: bool


@dataclass(frozen=True)
class Asked:
    """The content of a request: ``text`` to continue, of which the tokens may be ``given``.

    ``adapter``: the policy that samples. ``fields``: those that no router knows.
    """

    text: str
    session: str | None
    parameters: dict[str, Any]
    given: bool = False
    adapter: str | None = None
    fields: tuple[str, ...] = ()


@dataclass(eq=False, repr=False)
class Fact:
    """One response: ``prompt`` is the text it was asked with, ``text`` what a client could see of ``sampled``.

    ``number``: of its first attempt. ``sure``: so many tokens are certain to be recorded, the text's end if all are.
    ``ended``: an engine said that it ends there, so its last tokens may show nothing. ``lies``: the figures in which
    an engine contradicts itself. ``in_flight``: its answer has not ended, and the client has read ``heard`` of it.
    Without ``sampled``, it is only a request. ``gave_first``: the router knows whose the given ids are.
    ``givers``: sessions that gave its tokens as the beginning of theirs. ``weights``: see Attempt.
    """

    number: int
    asked: Asked
    consumed: list[int]
    sampled: list[int]
    rows: list[Row]
    text: str
    reader: Detokenizer
    sure: int = 0
    ended: bool = True
    lies: tuple[str, ...] = ()
    in_flight: bool = False
    heard: str = ""
    was_in_flight: bool = False
    gave_first: bool = True
    weights: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt, self.session, self.parameters = (
            self.asked.text,
            self.asked.session,
            self.asked.parameters,
        )
        self.givers: set[str | None] = set()
        self.comes_from([])
        self._look()

    def _look(self) -> None:
        self.places = list(self._places())
        self.visible = self._visible()
        hidden = self.reader.decode(self.sampled[self.visible :]) if self.visible is not None else ""
        self.tail = "" if "\ufffd" in hidden else hidden

    def __repr__(self) -> str:
        parents = [(parent.number if parent is not None else None, kept) for parent, kept in self.parents]
        asked = f"{self.prompt[-40:]!r} {self.consumed[-6:]} behind {parents}"
        marks = "".join(f" {mark}" for mark in (self.asked.adapter, *self.asked.fields, *self.lies) if mark)
        return (
            f"<{self.number} of {self.session}: {asked} -> {self.sampled} {self.text!r} {self.sure}{marks}>"
        )

    def retell(self, text: str) -> bool:
        """Take what the client heard for the text, where an abort may have held back some of it."""
        told = self.reader.text(self.consumed, self.sampled, self.parameters, {"type": "abort"})
        if text != self.text and not self.ended and text == told:
            self.text, self.ended = text, True
            self._look()
        return text == self.text

    @property
    def complete(self) -> bool:
        return 0 < self.sure == len(self.sampled)

    @property
    def on_record(self) -> bool:
        """True when it is certain that the router knows of the request."""
        return self.in_flight or self.sure > 0 or (bool(self.lies) and NOTHING_LEFT not in self.lies)

    def _read(self, kept: int, skip_special: bool) -> str:
        return self.reader.read(self.consumed, self.sampled[:kept], skip_special)

    def _places(self) -> Iterator[tuple[str, int, bool]]:
        """Texts that whole tokens spell, and how many: the fewest, where that does not depend on how they are read.

        With it goes whether the client has read them so.
        """
        for skip_special in (False, True):
            before = ""
            is_told = self._read(len(self.sampled), skip_special).startswith(self.text)
            for kept in range(1, len(self.sampled) + 1):
                shown = self._read(kept, skip_special)
                if (shown != before or not self.reader.one_reading) and not shown.endswith("\ufffd"):
                    yield shown, kept, is_told
                before = shown

    def _visible(self) -> int | None:
        """Count the tokens that the text shows; None when it ends within one."""
        size = len(self.sampled)
        if self._read(size, True) == self.text:
            return self._without_hidden(size)
        if self._read(size, False) == self.text:
            return size
        found = {shown: kept for shown, kept, _ in self.places}.get(self.text)
        if found is None and self.text.endswith("\ufffd"):  # half a character before what was trimmed
            for kept in range(size - 1, 0, -1):
                if self._read(kept, True) == self.text:
                    return self._without_hidden(kept)
                if self._read(kept, False) == self.text:
                    return kept
        return found

    def _without_hidden(self, kept: int) -> int:
        while kept and not self.reader.decode(self.sampled[kept - 1 : kept], True):
            kept -= 1
        return kept

    def anchors(self, text: str, *, reading: bool) -> Iterator[Anchor]:
        """Yield the places from which ``text`` may continue; or, for reading, those that it may stand for.

        Nobody goes on from a response whose engine contradicts itself; its prompt was sent all the same.
        """
        if not text.startswith(self.prompt):
            return
        start, size = len(self.prompt), len(self.sampled)
        if reading or len(text) == start:
            is_known = self.sure > 0 and not self.lies and not self.in_flight
            yield Anchor(start, self, 0, self.reader.one_reading and is_known)
        if self.lies or not size:
            return
        rest = text[start:]
        if reading and rest == self.text and self.ended:  # the hidden tokens too
            yield Anchor(len(text), self, size, self.complete)
            for shown, kept, _ in self.places if self.was_in_flight else ():
                if rest.startswith(shown) and shown != rest:  # told before, it may be all that is left
                    yield Anchor(start + len(shown), self, kept, False)
            return
        if reading:
            yield from self._told(rest, len(text))
        one = self.reader.one_reading
        heard = self.heard if self.in_flight else self.text
        for shown, kept, is_told in self.places:
            if rest.startswith(shown) and not (one and shown == self.text and kept != self.visible):
                certain = one and kept <= self.sure and is_told and heard.startswith(shown)
                yield Anchor(start + len(shown), self, kept, certain)
        if self.was_in_flight or not self.complete:
            yield from self._half_told(rest, start)
            yield from self._ended_so_far(rest, start)
        if self.visible and rest.startswith(self.text):
            yield Anchor(start + len(self.text), self, self.visible, one and self.complete)
        whole = self.text + self.tail
        if self.tail and rest.startswith(whole):
            yield Anchor(start + len(whole), self, size, one and self.complete)

    def _told(self, rest: str, end: int) -> Iterator[Anchor]:
        """The client left, or an abort came, with what was shown then. Half a character is of no text."""
        for told in range(1 if self.in_flight else max(1, self.sure), len(self.sampled) + 1):
            ids = self.sampled[:told]
            if rest in (self._read(told, True), self._read(told, False)):
                yield Anchor(end, self, told, False)
            if self.in_flight and self._read(told, False).endswith("\ufffd"):
                continue
            if rest == self.reader.text(self.consumed, ids, self.parameters, None):
                yield Anchor(end, self, told, False)

    def _half_told(self, rest: str, start: int) -> Iterator[Anchor]:
        """A byte that is no character was told alone, since what follows may be the beginning of a stop string.

        Or a client left there, and it is the last that is known.
        """
        size = len(self.sampled)
        for kept in range(1, size):
            shown = self._read(kept, skip_special=False)
            if shown.endswith("\ufffd") and rest.startswith(shown):
                each = (self.sampled[:told] for told in range(kept + 1, size + 1))
                if not self.complete or any(
                    shown == self.reader.text(self.consumed, ids, self.parameters, None) for ids in each
                ):
                    yield Anchor(start + len(shown), self, kept, False)

    def _ended_so_far(self, rest: str, start: int) -> Iterator[Anchor]:
        """Yield places where the response so far ended with hidden tokens, as a whole response does."""
        for kept in range(1, len(self.sampled)):
            visible = kept
            while visible and not self.reader.decode(self.sampled[visible - 1 : visible], True):
                visible -= 1
            whole = self._read(visible, skip_special=True) + self.reader.decode(self.sampled[visible:kept])
            if visible < kept and rest.startswith(whole):
                yield Anchor(start + len(whole), self, kept, False)

    def given(self, ids: list[int]) -> Iterator[Anchor]:
        """Yield the places from which ``ids`` may continue; positions are in tokens."""
        start = len(self.consumed)
        if ids[:start] != self.consumed:
            return
        yield Anchor(start, self, 0, False)  # what it was asked, whoever asked
        if self.lies or not self.sampled or len(ids) == start:
            return
        pairs = zip(self.sampled, ids[start:], strict=False)
        kept = next((place for place, (one, other) in enumerate(pairs) if one != other), -1)
        kept = min(len(self.sampled), len(ids) - start) if kept < 0 else kept
        for told in range(1, kept):  # less of it may be left
            yield Anchor(start + told, self, told, told == self.sure)
        yield Anchor(start + kept, self, kept, 0 < kept <= self.sure)

    def comes_from(self, parents: Sequence[tuple[Fact | None, int]]) -> None:
        """Note all contexts that it may have gone on from, ``(fact, tokens kept)``."""
        self.parents = list(dict.fromkeys(parents))
        self._spoken: set[Fact | None] = set()
        self.ancestors = {self}
        each = [
            one.sure_ancestors - ({one} if not kept else set()) if one else set()
            for one, kept in self.parents
        ]
        self.sure_ancestors: set[Fact] = {self}.union(set.intersection(*each) if each else ())
        for parent, kept in parents:
            self._spoken |= parent.speakers(kept) if parent is not None else {None}
            if parent is not None:
                self.ancestors |= parent.ancestors if kept else parent.ancestors - {parent}
        self.is_spelt, self.is_surely_spelt = True, True

    def contexts(self) -> set[tuple[Fact, int]]:
        """Return what its request may have gone on from, and what that went on from: ``(fact, tokens kept)``."""
        found: set[tuple[Fact, int]] = set()
        left = [self]
        while left:
            new = {(one, kept) for one, kept in left.pop().parents if one is not None} - found
            found |= new
            left += [one for one, _ in new]
        return found

    def is_usable(
        self, session: str | None, *, surely: bool = False, seen: dict[Fact, bool] | None = None
    ) -> bool:
        """True when the tokens of its context may be sent for a text of ``session``.

        Tokens that a client gave are its own spelling, unless the tokenizer spells the text so; several clients may
        have given the same. ``seen``: what was found for the same session. Ways to a fact are many more than facts.
        """
        seen = {} if seen is None else seen
        if self not in seen:
            seen[self] = self._is_usable(session, surely, seen)
        return seen[self]

    def _is_usable(self, session: str | None, surely: bool, seen: dict[Fact, bool]) -> bool:
        if session is not None and self.session == session and self.asked.given:
            return self.gave_first or not surely
        if session in self.givers and not surely:
            return True
        if not (self.is_surely_spelt if surely else self.is_spelt) and (
            session is None or session != self.session
        ):
            return False
        return (all if surely else any)(
            parent is None or parent.is_usable(session, surely=surely, seen=seen)
            for parent, _ in self.parents
        )

    def tells(
        self,
        rows: list[Row],
        kept: int,
        seen: dict[tuple[Fact, int, str | None], bool] | None = None,
        adapter: str | None = "",
    ) -> bool:
        """True when ``rows`` may be said of all tokens up to the first ``kept`` that were sampled.

        Logprobs that are equal and not 0 are equal bit for bit. ``adapter``: of the last response; what another one
        sampled is no sample. ``seen``: what was found for the same ``rows``.
        """
        seen = seen if seen is not None else {}
        size = len(self.consumed)
        if kept and adapter == "":
            adapter = self.asked.adapter
        if (self, kept, adapter) not in seen:
            own = self.rows[:kept]
            if adapter != self.asked.adapter:
                own = [Row(row.token, 0, 0.0, -1) for row in own]
            seen[self, kept, adapter] = rows[size : size + kept] == own and any(
                is_prompt(rows[start:size], self.consumed[start:])
                and (parent is None or parent.tells(rows, length, seen, adapter))
                for parent, length in self.parents
                for start in [len(parent.consumed) + length if parent is not None else 0]
            )
        return seen[self, kept, adapter]

    def fields(
        self, kept: int, seen: dict[Fact, tuple[set[str], set[str]]] | None = None
    ) -> tuple[set[str], set[str]]:
        """Unknown fields of the requests whose responses are in the context: possible ones, and certain ones.

        ``seen``: what was found of the contexts of facts. Ways to a fact are many more than facts.
        """
        seen = seen if seen is not None else {}
        if self not in seen:
            possible: set[str] = set()
            certain: set[str] | None = None
            for parent, length in self.parents:
                some, surely = parent.fields(length, seen) if parent is not None else (set(), set())
                possible |= some
                certain = surely if certain is None else certain & surely
            seen[self] = possible, certain or set()
        possible, surely = seen[self]
        own = set(self.asked.fields[:1]) if kept else set()
        return possible | own, surely | own

    def speakers(self, kept: int) -> set[Fact | None]:
        """Sessions that the last response may belong to, in the context of so many tokens."""
        return {self} if kept else self._spoken


def is_prompt(rows: list[Row], ids: list[int]) -> bool:
    """True when ``rows`` are what is to be said of ``ids`` that were not sampled."""
    return rows == [Row(token, 0, 0.0, -1) for token in ids]


def facts_of(attempts: Sequence[Attempt], reader: Detokenizer, asked: Asked, *, resume: bool) -> list[Fact]:
    """The responses that were made by ``attempts`` of one prompt; with ``resume`` one may go on from another."""
    chains: list[list[Attempt]] = []
    doubted: list[list[Attempt]] = []
    for attempt in (attempt for attempt in attempts if attempt.sampled):
        before = next((one for one in chains if resume and _continues(one[-1], attempt)), None)
        if before is not None:
            before.append(attempt)
            continue
        untold = next((one for one in chains if resume and _is_made_again(one[-1], attempt)), None)
        chains.append([*(untold[:-1] if untold is not None else ()), attempt])
        if len(chains[-1]) > 1:
            doubted.append(chains[-1])
    found = [_fact(chain, reader, asked, resume=resume) for chain in chains]
    for fact, chain in zip(found, chains, strict=True):
        if chain in doubted:
            fact.lies += ("the attempt between",)
    if not found and attempts:
        found.append(Fact(attempts[0].number, asked, attempts[0].consumed, [], [], "", reader))
    return found


def goes_on(before: Attempt, attempt: Attempt, *, resume: bool) -> bool:
    """True when ``attempt`` was made because ``before`` was aborted."""
    again = before.reason["type"] == "abort" and attempt.consumed == before.consumed
    return again or (resume and _continues(before, attempt))


def _continues(before: Attempt, attempt: Attempt) -> bool:
    """Two of one turn may have sampled alike so far; what goes on keeps its name, unless the engine changed it."""
    aborted = before.reason["type"] == "abort" and before.sampled
    is_named_so = before.lie == "id" or attempt.rid == before.rid
    return bool(aborted) and is_named_so and attempt.consumed == before.consumed + before.sampled


def _is_made_again(before: Attempt, attempt: Attempt) -> bool:
    """True when nothing was told of ``before``, an aborted attempt, so that ``attempt`` was asked for the same."""
    return (
        before.lie == NOTHING_LEFT
        and before.reason["type"] == "abort"
        and attempt.consumed == before.consumed
    )


def _fact(chain: list[Attempt], reader: Detokenizer, asked: Asked, *, resume: bool) -> Fact:
    rows = [
        Row(token, 1, logprob if attempt.told else None, version)
        for attempt in chain
        for token, logprob, version in zip(attempt.sampled, attempt.logprobs, attempt.versions, strict=True)
    ]
    last = chain[-1]
    reason: dict[str, Any] | None = last.reason if last.shape == "plain" else None
    ids = [row.token for row in rows]
    for size in range(1, len(ids) + 1 if resume else 0):
        ended = finish_reason(reader, ids[:size], asked.parameters)
        if ended is not None:  # as if it had been sampled in one go
            ids, rows, reason = ids[:size], rows[:size], ended
            break
    consumed = chain[0].consumed
    text = reader.text(consumed, ids, asked.parameters, reason)
    lies = tuple(attempt.lie for attempt in chain if attempt.lie is not None)
    fact = Fact(
        chain[0].number, asked, consumed, ids, rows, text, reader, ended=reason is not None, lies=lies
    )
    fact.weights = [one for attempt in chain for one in attempt.weights][: len(ids)]
    return fact
