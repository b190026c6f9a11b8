from __future__ import annotations

import numpy as np
import pytest

from radix_cache.direct import generate, read
from radix_cache.toy import EOS, encode, pack, sampled, trajectories, unpack
from slime_radix_cache.index.losses import Losses, Marks
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Prompt, Response, context_ids
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.retrieval.answer import record_of


def test_sampled_tokens_come_back_as_they_were_sampled() -> None:
    kept = trajectories()
    generate(kept, "b", sampled(1, 2, 1, 2))
    assert encode("babab") != [2, 1, 2, 1, 2]
    assert read(kept, "babab") == ([2, 1, 2, 1, 2], [0, 1, 1, 1, 1], None)


def test_pitfall_2_a_text_that_extends_another_has_its_own_tokens() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(2))
    generate(kept, "a", sampled(2, 1))
    assert read(kept, "ab") == ([1, 2], [0, 1], None)
    assert read(kept, "aba") == ([1, 2, 1], [0, 1, 1], None)


def test_a_prompt_that_extends_another_prompt_is_tokenised_as_a_whole() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1))
    assert generate(kept, "ab", sampled(1)) == [3]  # not 1, 2


def test_the_same_prompt_is_kept_once() -> None:
    kept = trajectories()
    generate(kept, "ab", sampled(1))
    generate(kept, "ab", sampled(2))
    assert (kept.segments, kept.tokens) == (3, 3)


def test_equal_samples_are_samples_each() -> None:
    kept = trajectories()
    for _ in range(3):
        generate(kept, "ab", sampled(1, EOS), "one")
    assert (kept.segments, kept.tokens) == (4, 7)
    assert kept.find_to_read(b"aba").candidates == 3
    assert len(kept.responses_of("one")) == 3


def test_a_sequence_that_is_told_twice_is_kept_once() -> None:
    kept = trajectories()
    kept.pin(None)
    first = kept.record(None, pack(3), b"ab", sampled(1, EOS), "one")
    assert kept.record(None, pack(3), b"ab", sampled(1, EOS), "one", again=first) is first
    assert (kept.segments, kept.tokens) == (2, 3)


def test_record_does_not_go_on_from_a_node_that_was_dropped() -> None:
    kept = trajectories()
    generate(kept, "b", sampled(1, 1, 1), "one")
    shorter = kept.record(None, pack(2), b"b", sampled(1, 1), "two")
    match = kept.find_to_continue(b"baab", "one")
    assert match.node is shorter.node
    kept.pin(match.context)
    kept.withdraw(shorter)
    kept.record(match.context, pack(2), b"baab", sampled(1), "one", known=match.node)
    kept.unpin(match.context)
    assert read(kept, "baaba", "one") == ([2, 1, 1, 2, 1], [0, 1, 1, 0, 1], None)


def test_the_same_tokens_with_other_logprobs_are_another_sample() -> None:
    kept = trajectories()
    generate(kept, "ab", sampled(1, logprobs=[-0.5]))
    generate(kept, "ab", sampled(1, logprobs=[-0.25]))
    assert kept.find_to_read(b"aba").candidates == 2


class TestHiddenTail:
    """Rule 4."""

    def kept(self) -> Trajectories:
        kept = trajectories()
        generate(kept, "a", sampled(1, 2, EOS))
        return kept

    def test_a_client_that_writes_the_eos_does_not_double_it(self) -> None:
        assert generate(self.kept(), "aab<e>ba", sampled(1)) == [1, 1, 2, EOS, 4]

    def test_a_client_that_appends_other_text_has_no_eos_in_the_middle(self) -> None:
        assert generate(self.kept(), "aabba", sampled(1)) == [1, 1, 2, 4]

    @pytest.mark.parametrize("text", ["aab", "aab<e>"])
    def test_retrieving_the_visible_text_returns_the_hidden_tokens_too(self, text: str) -> None:
        assert read(self.kept(), text) == ([1, 1, 2, EOS], [0, 1, 1, 1], None)

    def test_a_response_of_nothing_but_an_eos_is_kept(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(EOS))
        assert read(kept, "a") == ([1, EOS], [0, 1], None)
        assert generate(kept, "ab", sampled(1)) == [3]
        assert generate(kept, "a<e>b", sampled(1)) == [1, EOS, 2]


class TestCutText:
    """Rule 5."""

    def test_a_cut_at_a_tokens_end_keeps_the_tokens_before_it(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1, 2, 3, EOS))
        assert read(kept, "aab") == ([1, 1, 2], [0, 1, 1], None)
        assert generate(kept, "aabé", sampled(1)) == [1, 1, 2, 6]
        assert read(kept, "aabéa") == ([1, 1, 2, 6, 1], [0, 1, 1, 0, 1], None)

    def test_a_cut_inside_a_token_is_not_exact_until_an_engine_consumed_it(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1, 5, EOS))
        assert read(kept, "aaba") == ([1, 1, 4], [0, 1, 0], "cut_inside_token")
        assert generate(kept, "aaba", sampled(6)) == [1, 1, 4]
        assert read(kept, "aaba") == ([1, 1, 4], [0, 1, 0], None)
        assert read(kept, "aabaé") == ([1, 1, 4, 6], [0, 1, 0, 1], None)

    def test_text_ending_inside_a_token_continues_from_the_token_before(self) -> None:
        kept = trajectories()
        reason = '{"type":"stop","matched":"ab"}'  # "ab" + "ab": cut in token 5
        stopped = Sampled(pack(1, 5), None, "ab", -1, "ab", ((None, 2),), reason)
        generate(kept, "a", stopped)
        assert read(kept, "aab")[0] == [1, 1, 5]
        assert read(kept, "aabab")[0] == [1, 1, 5]
        assert generate(kept, "aabé", sampled(1)) == [1, 1, 2, 6]

    def test_a_cut_that_many_newer_samples_have_no_token_for_is_found(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 2, 6, 6, EOS))
        for token in (1, 2, 3, 4, 5, 6, 7, 8, 10):
            for last in (1, 2, 3, 4, 5, 6, 7, 8, 10):
                generate(kept, "b", sampled(3, 6, 6, 6, token, last))
        assert read(kept, "ba") == ([2, 1], [0, 1], None)

    def test_cutting_copies_no_tokens(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1, 2, 3, EOS))
        before = kept.tokens
        generate(kept, "aabé", sampled(1))
        assert kept.tokens - before == 2


class TestSameTextOtherTokens:
    """Rule 6."""

    def kept(self) -> Trajectories:
        kept = trajectories()
        generate(kept, "a", sampled(1, 2), "one")
        generate(kept, "a", sampled(3), "two")
        return kept

    def test_the_session_decides(self) -> None:
        kept = self.kept()
        assert read(kept, "aab", "one") == ([1, 1, 2], [0, 1, 1], None)
        assert read(kept, "aab", "two") == ([1, 3], [0, 1], None)
        assert generate(kept, "aabé", sampled(1), "one") == [1, 1, 2, 6]

    def test_without_a_session_the_newest_is_taken(self) -> None:
        assert read(self.kept(), "aab") == ([1, 3], [0, 1], None)

    def test_candidates_tells_how_many_there_are(self) -> None:
        assert self.kept().find_to_read(b"aab", "one").candidates == 2

    def test_samples_of_another_session_are_not_exact_for_this_one(self) -> None:
        kept = self.kept()
        generate(kept, "b", sampled(1), "three")
        assert read(kept, "aab", "three") == ([1, 3], [0, 0], "other_session")
        assert read(kept, "aab", "never seen") == ([1, 3], [0, 0], "other_session")

    def test_samples_without_a_session_belong_to_no_session(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1))
        assert read(kept, "aa", "one") == ([1, 1], [0, 0], "other_session")

    def test_a_session_goes_on_from_its_own_shorter_context(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1), "one")
        generate(kept, "a", sampled(1, 2, 1), "two")
        assert generate(kept, "aaba", sampled(1), "one") == [1, 1, 4]  # "ba" came from the environment
        assert generate(kept, "aaba", sampled(1), "two") == [1, 1, 2, 1]

    def test_session_prefers_its_own_context_to_an_equal_prompt(self) -> None:
        kept = trajectories()
        generate(kept, "aab", sampled(6))
        generate(kept, "a", sampled(1), "one")
        assert generate(kept, "aab", sampled(6), "one") == [1, 1, 2]

    def test_a_session_that_has_spoken_takes_nobody_elses_words(self) -> None:
        kept = trajectories()
        generate(kept, "b", sampled(1, 2), "other")
        generate(kept, "b", sampled(5), "one")
        assert generate(kept, "bb", sampled(6), "one") == [2, 2]  # "bab" is one token
        generate(kept, "b", sampled(3), "one")
        assert generate(kept, "baé", sampled(6), "one") == [4, 6]
        assert generate(kept, "baa", sampled(6), "new") == [2, 1, 1]

    def test_a_session_can_fork_from_what_another_said(self) -> None:
        kept = self.kept()
        assert generate(kept, "aabb", sampled(6), "three") == [1, 3, 2]
        assert read(kept, "aabbé", "three") == ([1, 3, 2, 6], [0, 1, 0, 1], None)
        assert read(kept, "aabb", "three") == ([1, 3, 2], [0, 1, 0], None)
        assert read(kept, "aab", "three") == ([1, 3], [0, 0], "other_session")


class TestGivenIds:
    """Rule 12: ids stay as they are, and those of earlier responses are known again."""

    def kept(self) -> Trajectories:
        kept = trajectories()
        generate(kept, "a", sampled(1, 2, EOS), "one")
        generate(kept, "a", sampled(1, 2, EOS, logprobs=[-1, -2, -3]), "two")
        return kept

    @pytest.mark.parametrize(
        ("ids", "known"),
        [
            ([1, 1, 2, EOS, 4], 4),
            ([1, 1, 2, 4], 3),
            ([1, 1, 3], 2),
            ([1, 3], 1),
            ([4, 1], 0),
            ([1], 1),
        ],
    )
    def test_the_longest_context_that_they_begin_with_is_found(self, ids: list[int], known: int) -> None:
        context = self.kept().find_given(pack(*ids))
        assert unpack(context_ids(context)) == ids[:known]

    def test_the_session_decides_whose_logprobs_they_are(self) -> None:
        kept = self.kept()
        for session, first in (("one", -1 / 7), ("two", -1.0), ("three", -1.0), (None, -1.0)):
            context = kept.find_given(pack(1, 1, 2, EOS, 2), session)
            assert record_of(context).logprobs[1] == first

    def test_a_session_without_such_a_context_takes_what_there_is(self) -> None:
        kept = self.kept()
        generate(kept, "b", sampled(6), "three")
        context = kept.find_given(pack(1, 1, 2, EOS, 2), "three")
        assert len(context_ids(context)) == 16


class TestWithdraw:
    """A stream may be recorded in part first."""

    def test_a_part_that_nobody_went_on_from_is_forgotten(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1), "one")
        response = kept.find_to_read(b"aa").context[0]  # type: ignore[index]  # it was recorded just now
        generate(kept, "a", sampled(1, 2), "one")
        kept.withdraw(response)  # type: ignore[arg-type]  # a response
        kept.withdraw(response)  # type: ignore[arg-type]  # twice changes nothing
        assert (kept.segments, kept.tokens) == (2, 3)
        assert read(kept, "aa") == ([1, 1], [0, 1], None)

    def test_a_part_that_somebody_went_on_from_stays(self) -> None:
        kept = trajectories()
        generate(kept, "a", sampled(1))
        response = kept.find_to_read(b"aa").context[0]  # type: ignore[index]  # as above
        generate(kept, "aab", sampled(1))
        kept.withdraw(response)  # type: ignore[arg-type]  # as above
        assert kept.segments == 4


def test_only_so_many_responses_are_cut_in_search_of_the_longest() -> None:
    tries = []

    def counting(ids: bytes, text: bytes) -> tuple[int, int]:
        tries.append(ids)
        return 0, 0

    kept = Trajectories(Limits(), counting)
    for token in (1, 2, 3, 4, 5, 6, 7, 8, 10):
        for last in (1, 2, 3, 4, 5, 6, 7, 8, 10):
            generate(kept, "b", sampled(6, token, last))
    tries.clear()
    kept.find_to_continue("béx".encode())
    assert len(tries) == len(set(tries)) == 32


class TestNotExact:
    """Rule 8."""

    def test_text_that_no_engine_has_seen_is_uncovered(self) -> None:
        kept = trajectories()
        assert read(kept, "ab") == ([3], [0], "uncovered_text")
        generate(kept, "a", sampled(1))
        assert read(kept, "aaé") == ([1, 1, 6], [0, 1, 0], "uncovered_text")
        assert read(kept, "abé") == ([1, 2, 6], [0, 0, 0], "uncovered_text")

    def test_the_prompt_of_an_answered_request_is_exact(self) -> None:
        kept = trajectories()
        generate(kept, "ab", sampled(1))
        assert read(kept, "ab") == ([3], [0], None)

    def test_missing_logprobs_are_said_and_not_invented(self) -> None:
        kept = trajectories()
        generate(kept, "a", Sampled(pack(1, 2), None, "ab", 2, "", ((None, 2),), "null"))
        assert read(kept, "aab") == ([1, 1, 2], [0, 1, 1], "no_logprobs")
        record = record_of(kept.find_to_read(b"aab").context)
        assert record.logprobs[0] == 0.0
        assert np.isnan(record.logprobs[1:]).all()

    def test_evicted_tokens_are_reported_as_evicted(self) -> None:
        kept = trajectories(Limits(tokens=3))
        generate(kept, "a", sampled(1, 2))
        generate(kept, "b", sampled(1, 2))
        assert read(kept, "aab")[2] == "evicted"
        assert read(kept, "bé")[2] == "uncovered_text"

    def test_no_loss_is_ever_forgotten(self) -> None:
        kept = trajectories(Limits(tokens=2), losses=Losses(texts=Marks(exact=1)))
        for text in ("a", "b", "é"):
            generate(kept, text, sampled(1))
        assert [read(kept, text)[2] for text in ("aa", "ba", "éa")] == ["evicted", "evicted", None]

    def test_evicted_response_is_known_by_its_hidden_end_too(self) -> None:
        kept = trajectories(Limits(versions=1))
        generate(kept, "a", sampled(1, EOS, version="1"))
        kept.see_version("2")
        assert [read(kept, text)[2] for text in ("a", "aa", "aa<e>", "aa<")] == ["evicted"] * 3 + [
            "uncovered_text"
        ]

    def test_reading_changes_nothing(self) -> None:
        kept = trajectories(Limits(tokens=6))
        generate(kept, "a", sampled(1, 2))
        generate(kept, "b", sampled(1, 2))
        for text in ("aab", "aa", "abé", "é"):
            read(kept, text)
        assert (kept.segments, kept.tokens) == (4, 6)
        generate(kept, "é", sampled(1))  # the oldest goes, although it was read last
        assert [read(kept, text)[2] for text in ("aab", "bab", "éa")] == ["evicted", None, None]


class TestEviction:
    """Rule 11."""

    def test_leaves_go_first_so_a_kept_context_is_whole(self) -> None:
        kept = trajectories(Limits(tokens=8))
        generate(kept, "a", sampled(1))
        generate(kept, "aab", sampled(1))
        generate(kept, "b", sampled(1))
        generate(kept, "é", sampled(1, 1, 1))
        assert read(kept, "aa")[2] is None
        assert read(kept, "aaba")[2] == "evicted"

    def test_a_hit_makes_a_context_young(self) -> None:
        kept = trajectories(Limits(tokens=5))
        generate(kept, "a", sampled(1))
        generate(kept, "b", sampled(1))
        generate(kept, "a", sampled(2))
        generate(kept, "é", sampled(1))
        assert read(kept, "ba")[2] == "evicted"
        assert read(kept, "ab")[2] is None

    def test_contexts_in_flight_stay(self) -> None:
        kept = trajectories(Limits(tokens=2))
        generate(kept, "a", sampled(1))
        context = kept.find_to_continue(b"aab").context
        kept.pin(context)
        for token in (1, 2, 6):
            generate(kept, "b", sampled(token, token))
        kept.record(context, pack(2), b"aab", sampled(1))
        assert read(kept, "aaba") == ([1, 1, 2, 1], [0, 1, 0, 1], None)
        kept.unpin(context)
        generate(kept, "é", sampled(1))
        assert read(kept, "aaba")[2] == "evicted"
        assert kept.tokens == 2

    def test_trajectories_unused_for_k_versions_are_evicted(self) -> None:
        kept = trajectories(Limits(versions=2))
        generate(kept, "a", sampled(1, version="8"))
        generate(kept, "b", sampled(1, version="9"))
        assert read(kept, "aa")[2] is None
        kept.see_version("10")
        assert [read(kept, text)[2] for text in ("aa", "ba")] == ["evicted", None]
        assert kept.evicted == {"weight_version": 2}

    def test_a_hit_under_new_weights_keeps_the_version_it_was_sampled_under(self) -> None:
        kept = trajectories(Limits(versions=2))
        generate(kept, "a", sampled(1, version="1"))
        generate(kept, "aab", sampled(1, version="2"))
        kept.see_version("3")
        assert record_of(kept.find_to_read(b"aaba").context).versions == [-1, "1", -1, "2"]

    def test_a_hit_alone_makes_a_context_young(self) -> None:
        kept = trajectories(Limits(versions=2))
        generate(kept, "a", sampled(1, version="1"))
        kept.see_version("2")
        context = kept.find_to_continue(b"aab").context
        kept.pin(context)
        kept.unpin(context)  # its worker broke
        kept.see_version("3")
        assert read(kept, "aa")[2] is None
        kept.see_version("4")
        assert read(kept, "aa")[2] == "evicted"

    def test_a_late_answer_of_old_weights_makes_nothing_older(self) -> None:
        kept = trajectories(Limits(versions=2))
        for version in ("10", "9", "10", "9"):
            generate(kept, "a", sampled(1, version=version))
        assert kept.evicted.total() == 0

    def test_named_versions_are_ordered_as_they_came(self) -> None:
        kept = trajectories(Limits(versions=2))
        generate(kept, "a", sampled(1, version="default"))
        kept.see_version("b")
        assert read(kept, "aa")[2] is None
        kept.see_version("a")
        assert read(kept, "aa")[2] == "evicted"

    def test_bytes_are_a_limit_too(self) -> None:
        kept = trajectories(Limits(size_bytes=3000))
        for length in range(1, 40):
            generate(kept, "b" * length, sampled(1, EOS))
        assert kept.size_bytes <= 3000
        assert kept.evicted["max_bytes"] > 0
        assert read(kept, "b" * 39 + "a")[2] is None

    def test_nothing_is_left_behind(self) -> None:
        kept = trajectories(Limits(versions=1))
        for text in ("a", "ab", "abé", "b"):
            generate(kept, text, sampled(1, 2, EOS, version="1"), "one")
            generate(kept, text + "aba", sampled(3, EOS, version="1"), "two")
        kept.see_version("2")
        assert (kept.segments, kept.tokens, kept.size_bytes) == (0, 0, 0)
        assert len(kept._sessions) == 0
        assert kept.has_lost("one")


def test_records_tell_prompts_from_responses() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1), "one")
    context = kept.find_to_continue(b"aab").context
    kept.pin(context)
    response = kept.record(context, pack(2), b"aab", sampled(EOS), "one")
    assert isinstance(response, Response)
    assert response.session == "one"
    assert isinstance(response.parent, Prompt)


def test_a_text_stands_for_a_response_with_its_stop_token_and_without() -> None:
    """A client asked with exactly what it was answered, so the engine consumed that without the stop token."""
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, EOS))
    assert kept.find_to_read(b"aab").candidates == 1
    assert generate(kept, "aab", sampled(5)) == [1, 1, 2]
    assert kept.find_to_read(b"aab").candidates == 2
    generate(kept, "aab", sampled(6))
    assert kept.find_to_read(b"aab").candidates == 2
