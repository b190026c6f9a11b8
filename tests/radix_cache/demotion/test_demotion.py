"""Segments that leave memory and come back: equal in all that a search or an answer can show."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from radix_cache.direct import generate, read
from radix_cache.toy import EOS, pack, sampled, spell, trajectories, unpack
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.index.losses import Count
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Context, Giver, Prompt, Response, Segment
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.retrieval.session_turns import SessionTurns


class Cold:
    """Trajectories, and a dict to demote them to."""

    def __init__(self) -> None:
        self.kept = trajectories()
        self.demotion = Demotion(self.kept)
        self.kept.demotion = self.demotion
        self.records: dict[int, bytes] = {}
        self.forgotten: list[int] = []
        self.demotion.forget = self.forgotten.append

    def demote(self) -> None:
        """Demote all that is not in flight."""
        segments: list[Segment] = []
        segment = self.kept._ages.oldest
        while segment is not None:
            segments.append(segment)
            segment = segment.newer
        for segment in segments:
            if not self.demotion.is_stored(segment):
                serial, record = self.demotion.record(segment)
                self.records[serial] = record
                self.demotion.note_stored(serial, len(record))
            self.demotion.memory.save(self.demotion.memory.entry_of(segment))
            self.demotion.demote(segment, "max_tokens")

    def promote(self, serials: list[int]) -> list[Segment]:
        found: list[Segment] = []
        while entries := self.demotion.directory.with_ancestors(serials):
            each = [entry.serial for entry in entries]
            self.demotion.promote(each, [self.records.get(one) for one in each], found)
        for segment in found:
            self.kept.unpin((segment, len(segment)))
        return found

    def text(self, text: str, session: str | None = None) -> list[Segment]:
        own = self.demotion.of_session(session) if session is not None else []
        return self.promote([*self.demotion.directory.along_text(text.encode()), *own])


@pytest.fixture
def cold() -> Cold:
    return Cold()


@pytest.fixture
def kept(cold: Cold) -> Trajectories:
    return cold.kept


def chain(context: Context) -> list[tuple[object, ...]]:
    """All that is known of a context, without what depends on the moment."""
    found: list[tuple[object, ...]] = []
    segment = context[0] if context is not None else None
    while segment is not None:
        facts: tuple[object, ...] = (segment.ids, segment.kept, text_of(segment.node), segment.doubt)
        if isinstance(segment, Response):
            facts += (segment.logprobs, segment.versions, segment.session, segment.finish_reason)
            facts += (segment.visible, segment.start, segment.adapter, segment.before, segment.is_decoded)
            facts += (segment.continuation_lost, text_of(segment.end))
        elif isinstance(segment, Prompt):
            facts += (segment.giver,)
        found.append(facts)
        segment = segment.parent
    return found


def test_everything_of_a_context_comes_back(cold: Cold, kept: Trajectories) -> None:
    answer = sampled(1, 2, EOS, logprobs=[-1 / 3, -2.5, 0.0])._replace(
        versions=(("7", 2), (None, 1)),
        doubt="unknown_field:x",
        adapter="A",
        is_decoded=True,
    )
    kept.record(None, pack(6), "é".encode(), answer, "s", Giver(("s",)))
    generate(kept, "éab<e>a", sampled(5), "s")
    before = [chain((one, len(one))) for one in kept.responses_of("s")]
    counts = kept.tokens, kept.segments, kept.size_bytes
    cold.demote()
    assert (kept.tokens, kept.segments, kept.size_bytes, kept.session_count) == (0, 0, 0, 0)
    assert not kept.evicted
    assert not kept.has_lost("s")
    cold.promote(cold.demotion.of_session("s"))
    assert [chain((one, len(one))) for one in kept.responses_of("s")] == before
    assert (kept.tokens, kept.segments, kept.size_bytes) == counts
    assert len(cold.demotion.directory) == 0


def test_samples_that_differ_only_in_logprobs_are_both_kept(cold: Cold, kept: Trajectories) -> None:
    for logprob in (-0.5, -0.25):
        generate(kept, "a", sampled(2, logprobs=[logprob]), "s")
    cold.demote()
    cold.text("ab", "s")
    first, second = kept.responses_of("s")
    assert first.ids == second.ids
    assert first.logprob_array(1).tolist() == [-0.5]
    assert second.logprob_array(1).tolist() == [-0.25]
    assert kept.candidates(b"ab") == Count(2, at_least=False)


def test_newest_stays_the_newest_whatever_is_promoted_first(cold: Cold, kept: Trajectories) -> None:
    for token in ((1, 2), (3,), (2, 1)):
        generate(kept, "<", sampled(*token))
    generate(kept, "<", sampled(2, 2), "s")
    cold.demote()
    generate(kept, "<", sampled(3), "s")  # without a look at what is demoted
    cold.promote(cold.demotion.of_session("s"))
    assert [unpacked.ids for unpacked in kept.responses_of("s")] == [pack(2, 2), pack(3)]
    cold.demote()
    cold.text("<ab")
    assert read(kept, "<ab") == ([7, 3], [0, 1], None)  # that of "s", which came last
    assert kept.candidates(b"<ab").number == 3


def test_prompt_recorded_again_while_demoted_is_one_prompt(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2), "s")
    cold.demote()
    generate(kept, "a", sampled(6), "t")
    cold.demote()
    generate(kept, "a", sampled(7), "u")
    cold.text("a")
    assert kept.segments == 4
    assert len({one.parent for name in "stu" for one in kept.responses_of(name)}) == 1
    assert kept.candidates(b"a").number == 1
    cold.demote()
    assert len(cold.demotion.directory) == 4
    cold.text("aé", "t")
    assert read(kept, "aé", "t") == ([1, 6], [0, 1], None)


def test_text_leads_only_to_what_may_matter(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2), "s")
    generate(kept, "a", sampled(6), "t")
    generate(kept, "é", sampled(2), "u")
    cold.demote()
    cold.text("ab")
    assert [len(kept.responses_of(name)) for name in "stu"] == [1, 0, 0]
    cold.text("a", "u")
    assert [len(kept.responses_of(name)) for name in "stu"] == [1, 1, 1]


def test_given_ids_lead_to_demoted_contexts(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2, EOS), "s")
    generate(kept, "ab<e>a", sampled(5), "s")
    cold.demote()
    ids = pack(1, 2, EOS, 1, 5, 6)
    assert kept.find_given(ids) is None
    cold.promote(list(cold.demotion.directory.along_ids(ids)))
    context = kept.find_given(ids)
    assert context is not None
    assert context[0] is kept.responses_of("s")[-1]


def test_unanswered_request_keeps_the_context_that_it_continued(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2), "s")
    (response,) = kept.responses_of("s")
    for prompt in (b"aba", b"abaa"):
        running = Running("fork", prompt, (response, 1))
        kept.begin(running)
        kept.end(running, is_recorded=False)
    generate(kept, "abaa", sampled(3), "other")
    cold.demote()
    cold.text("aba", "fork")
    match = kept.find_to_continue(b"abaab", "fork")
    assert (match.position, match.context) == (2, (kept.responses_of("s")[0], 1))


def test_longer_record_of_a_response_is_still_known(cold: Cold, kept: Trajectories) -> None:
    match = kept.find_to_continue(b"a", "s")
    kept.pin(match.context)
    part = kept.record(match.context, pack(1), b"a", sampled(2)._replace(finish_reason="null"), "s")
    kept.unpin(match.context)
    generate(kept, "ab<", sampled(6), "s")
    kept.record(None, pack(1), b"a", sampled(2, 1), "s", instead_of=part)
    longer = {one.ids: whole.ids for one, whole in kept.longer_of("s").items()}
    assert longer == {pack(2): pack(2, 1)}
    for _ in range(2):
        cold.demote()
        assert not kept.longer_of("s")
        cold.promote(cold.demotion.of_session("s"))
        assert {one.ids: whole.ids for one, whole in kept.longer_of("s").items()} == longer


def test_longer_record_of_another_session_is_still_known(cold: Cold, kept: Trajectories) -> None:
    part = kept.record(None, pack(1), b"a", sampled(2), None)
    generate(kept, "ab<", sampled(6), "s")
    kept.record(None, pack(1), b"a", sampled(2, 1), None, instead_of=part)
    generate(kept, "aba<", sampled(5), "s")
    for _ in range(3):
        source = SessionTurns(kept, str, RowRecorder(kept), ColdTrajectories(kept), OpenStreams())
        one, two = (source.context(turn, turns).sampled[0] for turns in [source.turns("s")] for turn in turns)
        assert (one[0], one[1:], two[1:]) == (two[0], (1, 2), (1, 3))
        cold.demote()
        cold.promote(cold.demotion.of_session("s"))


def grown_once(kept: Trajectories, giver: str | None) -> Response:
    """A response of ``giver`` that grew by a token, after ``s`` had continued its beginning."""
    part = kept.record(None, pack(1), b"a", sampled(2), giver)
    generate(kept, "ab<", sampled(6), "s")
    return kept.record(None, pack(1), b"a", sampled(2, 1), giver, instead_of=part)


@pytest.mark.parametrize("giver", ["s", "giver", None])
def test_demoted_part_keeps_the_longest_record_when_the_one_between_goes(
    cold: Cold, kept: Trajectories, giver: str | None
) -> None:
    between = grown_once(kept, giver)
    kept.pin((between, 2))
    cold.demote()
    kept.unpin((between, 2))
    kept.record(None, pack(1), b"a", sampled(2, 1, 5), giver, instead_of=between)
    generate(kept, "ababab<", sampled(6), "s")
    cold.demote()
    cold.promote(cold.demotion.of_session("s"))
    assert len(first_keys(kept)) == 1
    assert len(cold.demotion.grown.serials) == 2  # nothing is kept for the record between


@pytest.mark.parametrize("giver", ["giver", None])
def test_records_of_one_response_are_known_while_one_between_is_demoted(
    cold: Cold, kept: Trajectories, giver: str | None
) -> None:
    between = grown_once(kept, giver)
    generate(kept, "abae", sampled(6), "t")
    kept.record(None, pack(1), b"a", sampled(2, 1, 5), giver, instead_of=between)
    generate(kept, "ababab<", sampled(6), "s")
    cold.demote()
    cold.promote(cold.demotion.of_session("s"))
    assert len(first_keys(kept)) == 1
    cold.promote(cold.demotion.of_session("t"))
    assert len(first_keys(kept)) == 1


@pytest.mark.parametrize("seed", range(40))
def test_records_of_each_response_stay_together(cold: Cold, kept: Trajectories, seed: int) -> None:
    """Segments are demoted, promoted and evicted in any order."""
    some = random.Random(seed)
    running: dict[int, Response] = {}
    for number in range(120):
        kind = some.random()
        if kind < 0.1 or not running:
            start = kept.record(None, pack(1), b"a", begun(number), some.choice(["s", "t", None]))
            kept.pin((start, len(start)))
            running[number] = start
        elif kind < 0.4:
            stream, part = some.choice([*running.items()])
            longer = begun(stream, len(part) + 1)
            kept.unpin((part, len(part)))
            running[stream] = kept.record(None, pack(1), b"a", longer, part.session, instead_of=part)
            kept.pin((running[stream], len(running[stream])))
        elif kind < 0.6:
            part = some.choice([*running.values()])
            text = b"a" + spell(unpack(part.ids)).encode() + b"<"
            kept.record((part, len(part)), pack(7), text, sampled(6), some.choice(["s", "t", "u"]))
        elif kind < 0.65:
            part = running.pop(some.choice([*running]))
            kept.unpin((part, len(part)))
        elif kind < 0.8:
            cold.demote()
        elif kind < 0.97:
            cold.promote(cold.demotion.of_session(some.choice("stu")))
        else:
            kept.forget(some.choice("stu"))
        together: dict[bytes, list[Response]] = {}
        for segment in kept_responses(kept):
            if segment.start == 1:
                together.setdefault((segment.logprobs or b"")[:8], []).append(segment)
        for records in together.values():
            assert {kept.longer.longest(one) for one in records} == {max(records, key=len)}
    for part in running.values():
        kept.unpin((part, len(part)))
    for session in "stu" * 9:
        cold.promote(cold.demotion.of_session(session))
        kept.forget(session)
    anonymous = [one for one in kept_responses(kept) if one.session is None]
    assert len(kept.longer) <= len(anonymous)
    assert len(cold.demotion.grown.serials) <= len(anonymous) + len(cold.demotion.directory)


def begun(number: int, length: int = 1) -> Sampled:
    """The first tokens of a response, whose first logprob no other response has."""
    return sampled(*[2] * length, logprobs=[-float(number), *[-0.5] * (length - 1)])


def kept_responses(kept: Trajectories) -> list[Response]:
    assert isinstance(kept.demotion, Demotion)
    return [one for one in kept.demotion.memory.serials if isinstance(one, Response)]


def first_keys(kept: Trajectories) -> set[Hashable]:
    """The keys of the first responses in the contexts of "s"."""
    source = SessionTurns(kept, str, RowRecorder(kept), ColdTrajectories(kept), OpenStreams())
    turns = source.turns("s")
    return {source.context(turn, turns).sampled[0][0] for turn in turns}


def test_part_is_not_withdrawn_while_a_demoted_response_continues_it(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2), "s")
    (part,) = kept.responses_of("s")
    generate(kept, "ab<", sampled(6), "s")
    kept.pin((part, 1))
    cold.demote()
    kept.unpin((part, 1))
    assert not part.children
    kept.withdraw(part)
    kept.forget("t")
    assert kept.responses_of("s") == [part]


@pytest.mark.parametrize("wrong", [b"", b"short", None, "other"])
def test_lost_record_is_a_loss_of_all_that_continues_it(
    cold: Cold, kept: Trajectories, wrong: bytes | str | None
) -> None:
    generate(kept, "a", sampled(2), "s")
    generate(kept, "aba", sampled(5), "s")
    generate(kept, "ababab", sampled(6), "fork")
    cold.demote()
    serials = sorted(cold.demotion.of_session("s"))
    if wrong == "other":
        cold.records[serials[1]] = cold.records[serials[0]]
    elif isinstance(wrong, bytes):
        cold.records[serials[1]] = cold.records[serials[1]][: len(wrong)]
    else:
        del cold.records[serials[1]]
    damaged: list[int] = []
    cold.demotion.damaged = damaged.append
    cold.text("ababab", "s")
    assert damaged == ([serials[1]] if wrong is not None else [])  # the store counts a missing record itself
    (first,) = kept.responses_of("s")
    assert first.continuation_lost
    assert kept.has_lost("s")
    assert kept.has_lost("fork")
    assert not cold.demotion.of_session("fork")
    assert kept.evicted == {"not_in_store": 2}
    assert kept.candidates(b"ab") == Count(1, at_least=True)
    assert kept.candidates(b"ababab") == Count(1, at_least=True)
    assert read(kept, "ababab", "s")[2] == read(kept, "abababé", "fork")[2] == "evicted"
    assert serials[1] in cold.forgotten


def test_forgotten_session_leaves_no_record(cold: Cold, kept: Trajectories) -> None:
    generate(kept, "a", sampled(2), "s")
    cold.demote()
    cold.promote(cold.demotion.of_session("s"))
    kept.forget("s")
    assert sorted(cold.forgotten) == [1, 2]
    assert not cold.demotion.sessions
    assert kept.segments == 0


def test_order_of_sessions_is_that_of_their_first_responses(cold: Cold, kept: Trajectories) -> None:
    for name in ("s", "t", "s"):
        generate(kept, "a", sampled(2, version="7"), name)
        cold.demote()
    assert list(cold.demotion.sessions) == ["s", "t"]
    assert cold.demotion.sizes_of("s") == [((("7", 1),), 1)] * 2
    cold.promote(cold.demotion.of_session("t"))
    assert cold.demotion.sizes_of("t") == [((("7", 1),), 1)]
