"""The leaves of a session, and their records, without a router."""

from __future__ import annotations

from typing import Any

import orjson

from radix_cache.toy import EOS, encode, pack, sampled, spell, trajectories, unpack
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import context_ids
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.retrieval.branches import Branch, Shared, answer_of, branches
from slime_radix_cache.retrieval.formats import JSON
from slime_radix_cache.retrieval.session_turns import SessionTurns
from slime_rows.body_pieces import joined


def generate(kept: Trajectories, text: str, answer: Sampled, session: str = "s") -> None:
    match = kept.find_to_continue(text.encode(), session)
    rest = pack(*encode(text.encode()[match.position :].decode()))
    kept.pin(match.context)
    kept.record(match.context, rest, text.encode(), answer, session)
    kept.unpin(match.context)


def give(kept: Trajectories, ids: list[int], answer: Sampled) -> None:
    text = spell(ids).encode()
    context = kept.find_given(pack(*ids), "s")
    kept.pin(context)
    kept.record(context, pack(*ids)[len(context_ids(context)) :], text, answer, "s")
    kept.unpin(context)


def leaves(kept: Trajectories, session: str = "s") -> list[Branch]:
    return branches(kept.responses_of(session), kept.candidates, kept.longer_of(session))


def record(branch: Branch) -> dict[str, Any]:
    """As a client gets it."""
    document: dict[str, Any] = orjson.loads(joined(JSON.one(answer_of(branch, spell))))
    return document


def tokens_of(branch: Branch) -> list[int]:
    return unpack(context_ids((branch.leaf, len(branch.leaf))))


def test_a_response_that_was_gone_on_from_is_no_leaf() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, EOS))
    generate(kept, "aab<e>b", sampled(1))
    (branch,) = leaves(kept)
    assert tokens_of(branch) == [1, 1, 2, EOS, 2, 1]
    assert (branch.text, branch.prompt_bytes, branch.prompt_tokens) == (b"aab<e>ba", 1, 1)


def test_parts_of_a_response_recorded_in_pieces_are_no_leaves() -> None:
    """Of what was recorded in pieces, each with more: those that nobody went on from are withdrawn."""
    kept = trajectories()
    pieces = [kept.record(None, pack(1), b"a", sampled(1, 2), "s")]
    generate(kept, "aabé", sampled(1))
    for ids in ((1, 2, 2), (1, 2, 2, EOS)):
        part = pieces[-1]
        pieces.append(kept.record(None, pack(1), b"a", sampled(*ids), "s", again=part, instead_of=part))
    assert [tokens_of(branch) for branch in leaves(kept)] == [[1, 1, 2, 6, 1]]
    assert kept.longer_of("s") == {pieces[0]: pieces[2]}
    kept.forget("s")
    assert kept.longer_of("s") == {}


def test_part_of_a_response_that_was_not_continued_is_no_leaf() -> None:
    """A request that would go on from it is on its way, or has failed: all of the response is one sample."""
    kept = trajectories()
    part = kept.record(None, pack(1), b"a", sampled(1, 2), "s")
    match = kept.find_to_continue(b"aabb", "s")
    assert match.context == (part, 2)
    kept.pin(match.context)
    kept.record(None, pack(1), b"a", sampled(1, 2, 2), "s", again=part, instead_of=part)
    for is_over in (False, True):
        if is_over:
            kept.unpin(match.context)
        assert [tokens_of(branch) for branch in leaves(kept)] == [[1, 1, 2, 2]]
        (turn,) = SessionTurns(kept, spell, RowRecorder(kept), ColdTrajectories(kept), OpenStreams()).turns(
            "s"
        )
        assert (turn.tokens, turn.wholes) == (3, {part: turn.response})


def test_partly_kept_response_is_no_leaf() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, 1))
    generate(kept, "aabé", sampled(1))
    assert [tokens_of(branch) for branch in leaves(kept)] == [[1, 1, 2, 6, 1]]


def test_response_with_no_token_kept_is_a_leaf() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(5, 1))
    give(kept, [1, 6], sampled(1))
    one, two = leaves(kept)
    assert (tokens_of(one), tokens_of(two)) == ([1, 5, 1], [1, 6, 1])
    assert two.parent == Shared(0, 1)
    assert record(two)["loss_mask"] == [0, 0, 1]
    assert record(two)["generation_versions"] == [-1, -1, None]
    assert record(two)["rollout_logp"] == [0.0, 0.0, -1 / 7]
    assert two.prompt_tokens == 2


def test_response_continued_by_another_session_is_still_a_leaf() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1))
    generate(kept, "aab", sampled(1), "other")
    assert [tokens_of(branch) for branch in leaves(kept)] == [[1, 1]]
    (theirs,) = leaves(kept, "other")
    assert (tokens_of(theirs), theirs.prompt_bytes) == ([1, 1, 2, 1], 1)


def test_the_parent_is_the_branch_that_most_is_shared_with() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, 2))
    give(kept, [1, 1, 6], sampled(1))
    give(kept, [1, 1, 2, 6], sampled(1))
    give(kept, [1, 1, 2, 7], sampled(1))
    give(kept, [6, 6], sampled(1))
    assert [branch.parent for branch in leaves(kept)] == [None, Shared(0, 2), Shared(1, 3), None]


def test_runs_of_one_version_are_told_as_one() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, version="1"))
    generate(kept, "aa", sampled(2, version="1"))
    generate(kept, "aab", sampled(1, version="2"))
    (branch,) = leaves(kept)
    assert record(branch)["weight_versions"] == [
        {"version": "1", "start": 1, "end": 3},
        {"version": "2", "start": 3, "end": 4},
    ]


def test_a_part_of_a_response_keeps_the_versions_of_its_tokens() -> None:
    kept = trajectories()
    two_versions = Sampled(
        pack(1, 2, 1, 2), pack(0, 0, 0, 0), "abab", 4, "", (("1", 2), ("2", 2)), '{"type":"abort"}'
    )
    generate(kept, "a", two_versions)
    generate(kept, "aabaé", sampled(1, version="3"))
    (branch,) = leaves(kept)
    assert record(branch)["generation_versions"] == [-1, "1", "1", "2", -1, "3"]
    generate(kept, "b", two_versions)
    generate(kept, "babé", sampled(1, version="3"))
    assert record(leaves(kept)[1])["generation_versions"] == [-1, "1", "1", -1, "3"]


def test_a_loss_without_a_session_is_nobodys() -> None:
    kept = trajectories(Limits(tokens=4))
    kept.record(None, pack(6), "é".encode(), sampled(1, 1))
    generate(kept, "a", sampled(1, 1))
    assert kept.evicted["max_tokens"] > 0
    assert not kept.has_lost("s")
    (branch,) = leaves(kept)
    assert record(branch)["exact"]


def test_branch_before_a_lost_continuation_is_inexact() -> None:
    kept = trajectories(Limits(tokens=8))
    generate(kept, "a", sampled(1))
    generate(kept, "aab", sampled(1, 1), "other")
    generate(kept, "aaé", sampled(1, 1))
    kept.pin(kept.find_to_continue(b"aaba", "other").context)
    generate(kept, "b", sampled(2, 2), "third")
    assert kept.has_lost("s")
    (branch,) = leaves(kept)
    assert tokens_of(branch) == [1, 1]
    assert record(branch)["inexact_reason"] == "evicted"
    generate(kept, "aaé", sampled(1))
    (branch,) = leaves(kept)
    assert tokens_of(branch) == [1, 1, 6, 1]
    assert record(branch)["exact"]
