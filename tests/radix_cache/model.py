"""A model of Trajectories: the same verbs, and no index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_cache.toy import EOS, TOKENS, encode, pack, sampled, spell, trajectories, unpack
from slime_radix_cache.index.segments import (
    Context,
    Prompt,
    Response,
    Segment,
    context_ids,
    last_sampled,
    links,
)
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.trajectories import Limits
from slime_radix_cache.retrieval.answer import Lost, inexact_reason, record_of

SESSIONS = st.sampled_from([None, "one", "two"])
ANSWERS = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), max_size=4)
ADDED = st.text("abé", max_size=4)


@dataclass
class ModelTurn:
    """The tokens that an engine consumed and sampled in one turn, and what is to be known of each token."""

    prompt: str
    consumed: list[int]
    consumed_mask: list[int]
    sampled: list[int]
    session: str | None
    response: Response
    used: int

    @property
    def asked(self) -> Context:
        """The context with which it was asked."""
        return (self.response.parent, self.response.kept) if self.response.parent is not None else None

    @property
    def visible(self) -> list[int]:
        return self.sampled[:-1] if self.sampled[-1] == EOS else self.sampled

    @property
    def tokens(self) -> list[int]:
        return self.consumed + self.sampled

    def goes_on(self) -> dict[str, list[int]]:
        """Return the texts that may leave it, with the tokens until there: at each token's end."""
        ends = range(1, len(self.sampled) + 1)
        return {self.prompt + spell(self.sampled[:end]): self.consumed + self.sampled[:end] for end in ends}


class Flight(NamedTuple):
    """A request on its way."""

    context: Context
    text: str
    consumed: list[int]
    mask: list[int]
    session: str | None
    running: Running | None
    node: Node | None


class Model(RuleBasedStateMachine):
    @initialize(tokens=st.sampled_from([0, 0, 12, 40]), versions=st.sampled_from([0, 2]))
    def begin(self, tokens: int, versions: int) -> None:
        self.kept = trajectories(Limits(tokens=tokens, versions=versions))
        self.limit = tokens
        self.facts: list[ModelTurn] = []
        self.flying: list[Flight] = []
        self.lost: set[str] = set()
        self.unanswered: list[Flight] = []
        self.version = 0
        self.clock = 0

    # Questions to the model.

    def _in_order(self, text: str, session: str | None) -> list[Callable[[Response | None, int], bool]]:
        """Contexts to go on from, by their last response and how much of it there is.

        First its own; then, if it has not spoken yet, anyone's; else what it went on from when it spoke.
        """
        if session is None:
            return [lambda said, kept: True]
        spoken: list[Context] = [
            (fact.response.parent, fact.response.kept) if fact.response.parent is not None else None
            for fact in self.facts
            if fact.session == session and text.startswith(fact.prompt)
        ]
        spoken += [
            flight.context
            for flight in [*self.flying, *self.unanswered]
            if text.startswith(flight.text) and flight.session == session
        ]
        inherited = {
            (one, size) for context in spoken for one, kept in links(context) for size in range(kept + 1)
        }
        free = not spoken and session not in self.lost
        return [
            lambda said, kept: said is not None and said.session == session,
            lambda said, kept: free or said is None or (said, kept) in inherited,
        ]

    def _expected(self, text: str, session: str | None) -> tuple[int, list[list[int]]]:
        """The longest place to continue ``text`` from, and all token runs that are right there."""
        for fits in self._in_order(text, session):
            found: dict[str, list[list[int]]] = {}
            for fact in self.facts:
                for until, tokens in fact.goes_on().items():
                    if text.startswith(until) and fits(fact.response, len(tokens) - len(fact.consumed)):
                        found.setdefault(until, []).append(tokens)
                if fact.prompt == text and fits(*(last_sampled(fact.asked) or (None, 0))):
                    found.setdefault(text, []).append(fact.consumed)
            for prompt in self._lonely_prompts():
                last = last_sampled((prompt, len(prompt))) or (None, 0)
                if text_of(prompt.node).decode() == text and fits(*last):
                    found.setdefault(text, []).append(unpack(context_ids((prompt, len(prompt)))))
            if found:
                longest = max(found, key=len)
                return len(longest), found[longest]
        return 0, [[]]

    def _lonely_prompts(self) -> list[Prompt]:
        """Prompts whose answers were evicted before them."""
        return [
            segment for segment in self._segments() if isinstance(segment, Prompt) and not segment.children
        ]

    def _texts(self) -> list[str]:
        texts = [""]
        for fact in self.facts:
            whole = fact.prompt + spell(fact.sampled)
            texts += [
                whole,
                whole.removesuffix(TOKENS[EOS]),
                fact.prompt,
                whole[: len(fact.prompt) + 1],
                whole[:-1],
            ]
        return texts

    # Steps.

    @rule(data=st.data(), answer=ANSWERS, eos=st.booleans(), added=ADDED, session=SESSIONS)
    def turn(
        self, data: st.DataObject, answer: list[int], eos: bool, added: str, session: str | None
    ) -> None:
        text = data.draw(st.sampled_from(self._texts())) + added
        if text:
            self._leave(text, session)
            self._arrive(self.flying.pop(), [*answer, EOS] if eos or not answer else answer)

    @rule(data=st.data(), added=ADDED, session=SESSIONS)
    def leave(self, data: st.DataObject, added: str, session: str | None) -> None:
        text = data.draw(st.sampled_from(self._texts())) + added
        if text:
            self._leave(text, session)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), answer=ANSWERS)
    def arrive(self, data: st.DataObject, answer: list[int]) -> None:
        flight = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if answer:
            self._arrive(flight, answer)
        else:
            self._land(flight, is_recorded=False)  # the worker broke
            if flight.session is not None:
                self.unanswered.append(flight)
            self._used(flight.context)

    @rule()
    def update_weights(self) -> None:
        self.version += 1
        self.kept.see_version(str(self.version))
        self._forget()

    @rule(data=st.data(), session=SESSIONS, added=ADDED)
    def read(self, data: st.DataObject, session: str | None, added: str) -> None:
        text = (data.draw(st.sampled_from(self._texts())) + added) or "a"
        prompt = text.encode()
        match = self.kept.find_to_read(prompt, session)
        rest = pack(*encode(prompt[match.position :].decode()))
        record = record_of(match.context, rest, None if match.is_asked else session)
        lengths = {len(record.tokens), len(record.loss_mask), len(record.logprobs), len(record.versions)}
        assert len(lengths) == 1
        assert session is None or self.kept.has_lost(session) == (session in self.lost)
        lost = Lost(session in self.lost, self.kept.is_lost(prompt))
        reason = inexact_reason(match, prompt, record, lambda: lost)
        tokens, mask = record.tokens.tolist(), record.loss_mask.tolist()
        assert (reason is None) <= ((tokens, mask) in self._exact(text, session))
        ended = [fact for fact in self.facts if text in self._ends(fact)]
        own = [fact for fact in ended if fact.session == session] if session is not None else ended
        if own:
            assert (tokens, mask) == (own[-1].tokens, self._mask(own[-1])) or self._older_is_right(
                text, own, tokens
            )
            assert reason is None

    @staticmethod
    def _ends(fact: ModelTurn) -> set[str]:
        return {fact.prompt + spell(fact.visible), fact.prompt + spell(fact.sampled)}

    @staticmethod
    def _older_is_right(text: str, own: list[ModelTurn], tokens: list[int]) -> bool:
        """Newest is the one recorded last; a fact told again keeps its place, and so may a prompt with this text."""
        return tokens in [fact.tokens for fact in own] or tokens in [fact.consumed for fact in own]

    @staticmethod
    def _mask(fact: ModelTurn) -> list[int]:
        return fact.consumed_mask + [1] * len(fact.sampled)

    def _exact(self, text: str, session: str | None) -> list[tuple[list[int], list[int]]]:
        """All that is true of ``text``; for a session all that it sampled or went on from, and prompts alone."""
        true = []
        for fact in self.facts:
            own = session in (None, fact.session)
            if not own:
                before = last_sampled(fact.asked)
                if text == fact.prompt and (before is None or before[0].session == session):
                    true.append((fact.consumed, fact.consumed_mask))
                continue
            if text in self._ends(fact):
                true.append((fact.tokens, self._mask(fact)))
            if text == fact.prompt:
                true.append((fact.consumed, fact.consumed_mask))
            tokens = fact.goes_on().get(text)
            if tokens is not None:
                true.append((tokens, self._mask(fact)[: len(tokens)]))
        for prompt in self._lonely_prompts():
            if text_of(prompt.node).decode() == text:
                record = record_of((prompt, len(prompt)), session=session)
                true.append((record.tokens.tolist(), record.loss_mask.tolist()))
        return true

    # The course of a turn.

    def _leave(self, text: str, session: str | None) -> None:
        prompt = text.encode()
        match = self.kept.find_to_continue(prompt, session)
        known = unpack(context_ids(match.context))
        length, right = self._expected(text, session)
        if len(self.facts) <= 8:  # more are not tried in search of the longest cut
            assert len(prompt[: match.position].decode()) == length
            assert known in right
        self.kept.pin(match.context)
        running = Running(session, prompt, match.context) if session is not None else None
        if running is not None:
            self.kept.begin(running)
        rest = encode(prompt[match.position :].decode())
        mask = record_of(match.context).loss_mask.tolist() + [0] * len(rest)
        self.flying.append(Flight(match.context, text, known + rest, mask, session, running, match.node))

    def _land(self, flight: Flight, *, is_recorded: bool) -> None:
        self.kept.unpin(flight.context)
        if flight.running is not None:
            self.kept.end(flight.running, is_recorded=is_recorded)

    def _arrive(self, flight: Flight, answer: list[int]) -> None:
        context, text, consumed, mask, session, _, node = flight
        rest = pack(*consumed[len(context_ids(context)) // 4 :])
        said = sampled(*answer, version=str(self.version))
        response = self.kept.record(context, rest, text.encode(), said, session, known=node)
        flying = [context, *(other for other, *_ in self.flying)]
        pinned = {id(segment) for one in flying for segment, _ in links(one)}
        if self.limit and self.kept.tokens > self.limit:
            whole = {id(segment) for segment, _ in links((response, 0))}
            assert all(id(segment) in pinned | whole for segment in self._segments())
        self._land(flight, is_recorded=True)
        known = [fact for fact in self.facts if fact.response is response]
        if not known:
            self.facts.append(ModelTurn(text, consumed, mask, answer, session, response, 0))
        self._used((response, 0))
        self._used(context)
        self._forget()

    def _used(self, context: Context) -> None:
        self.clock += 1
        used = {id(segment) for segment, _ in links(context)}
        for fact in self.facts:
            if id(fact.response) in used:
                fact.used = self.clock

    def _forget(self) -> None:
        """Take leave of what was evicted, which must have been the oldest and not in flight."""
        alive = {id(segment) for segment in self._segments()}
        gone = [fact for fact in self.facts if id(fact.response) not in alive]
        self.facts = [fact for fact in self.facts if id(fact.response) in alive]
        pinned = {id(segment) for context, *_ in self.flying for segment, _ in links(context)}
        kept = [fact.used for fact in self.facts if id(fact.response) not in pinned]
        for fact in gone:
            if fact.session is not None:
                self.lost.add(fact.session)
            assert id(fact.response) not in pinned
            assert not kept or fact.used <= min(kept)

    def _segments(self) -> list[Segment]:
        found: dict[int, Segment] = {}
        for node in self._nodes():
            for segment in node.ends:
                found[id(segment)] = segment
        return list(found.values())

    def _nodes(self) -> list[Node]:
        nodes, todo = [], [self.kept._index.root]
        while todo:
            node = todo.pop()
            nodes.append(node)
            todo += node.all_kids
        return nodes

    # Invariants.

    @invariant()
    def the_index_is_a_radix_tree(self) -> None:
        nodes = self._nodes()
        assert len(nodes) == self.kept._index.nodes + 1
        assert sum(len(node.edge) for node in nodes) == self.kept._index.size_bytes
        for node in nodes:
            kids = node.all_kids
            assert len({kid.edge[0] for kid in kids}) == len(kids)
            assert all(node.kid_at(kid.edge[0]) is kid for kid in kids)
            assert (len(kids) == 1) == isinstance(node.kids, Node)
            for kid in kids:
                assert kid.parent is node
                assert kid.depth == node.depth + len(kid.edge)
            if node.parent is not None:
                assert node.ends or node.begins or len(kids) > 1, "a node that nothing needs"

    @invariant()
    def each_response_covers_its_text_and_nothing_else(self) -> None:
        responses = {id(fact.response): fact.response for fact in self.facts}
        for node in self._nodes():
            above = node.depth - len(node.edge)
            expected = {
                key
                for key, response in responses.items()
                if response.start < node.depth
                and response.reach.depth > above
                and text_of(response.reach).startswith(text_of(node))
            }
            assert {id(response) for response in node.through} == expected

    @invariant()
    def each_response_begins_where_its_prompt_ends(self) -> None:
        begins = {id(one): text_of(node).decode() for node in self._nodes() for one in node.begins}
        assert begins == {id(fact.response): fact.prompt for fact in self.facts}

    @invariant()
    def the_counters_are_right(self) -> None:
        segments = self._segments()
        assert self.kept.segments == len(segments)
        assert self.kept.tokens == sum(map(len, segments))
        for segment in segments:
            children = [other for other in segments if other.parent is segment]
            assert segment.children == len(children)
            pins = sum(segment is one for context, *_ in self.flying for one, _ in links(context))
            assert segment.pins == pins

    @invariant()
    def by_age_a_segment_comes_before_its_parent(self) -> None:
        order = []
        segment = self.kept._ages.oldest
        while segment is not None:
            order.append(segment)
            segment = segment.newer
        place = {id(segment): number for number, segment in enumerate(order)}
        for number, segment in enumerate(order):
            assert segment.pins == 0
            if segment.parent is not None and not segment.parent.pins:
                assert place[id(segment.parent)] > number
        assert len(order) == sum(segment.pins == 0 for segment in self._segments())
