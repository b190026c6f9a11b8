"""Another session is asked what a session has said: what it sampled itself is still not tokenised again for it."""

from __future__ import annotations

import pytest

from radix_cache.direct import generate, read
from radix_cache.toy import EOS, pack, sampled, trajectories, unpack
from slime_radix_cache.index.segments import Response, context_ids
from slime_radix_cache.index.trajectories import Trajectories

#: The second question to both; ``own`` then says ``b`` and ``a``, which nobody would write in two tokens.
SECOND = "aabé"
THIRD = "aabébaé"


@pytest.fixture
def kept() -> Trajectories:
    """``own`` speaks twice. The other one forks in between, and is asked the longer text, too."""
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, EOS), "own")
    generate(kept, SECOND, sampled(6), "fork")
    assert generate(kept, SECOND, sampled(2, 1, EOS), "own") == [1, 1, 2, 6]
    assert generate(kept, THIRD, sampled(5), "fork") == [1, 1, 2, 6, 4, 6]
    return kept


def test_own_answer_comes_before_the_same_prompt_of_another_session(kept: Trajectories) -> None:
    assert generate(kept, THIRD, sampled(5), "own") == [1, 1, 2, 6, 2, 1, 6]
    assert read(kept, THIRD + "bab", "own") == ([1, 1, 2, 6, 2, 1, 6, 5], [0, 1, 1, 0, 1, 1, 0, 1], None)


def test_own_answer_comes_first_also_when_the_other_session_was_last(kept: Trajectories) -> None:
    generate(kept, THIRD, sampled(5), "own")
    kept.withdraw(kept.responses_of("fork")[-1])
    assert generate(kept, THIRD, sampled(3), "fork") == [1, 1, 2, 6, 4, 6]
    assert generate(kept, THIRD, sampled(10), "own") == [1, 1, 2, 6, 2, 1, 6]
    assert read(kept, THIRD, "own") == ([1, 1, 2, 6, 2, 1, 6], [0, 1, 1, 0, 1, 1, 0], None)


def test_prompts_of_another_session_are_not_read_as_own_samples(kept: Trajectories) -> None:
    own = ([1, 1, 2, 6, 2, 1, 6], [0, 1, 1, 0, 1, 1, 0], "other_session")
    assert read(kept, THIRD, "own") == own
    assert read(kept, THIRD) == ([1, 1, 2, 6, 4, 6], [0, 1, 1, 0, 0, 0], None)


def test_given_ids_are_own_samples_where_another_session_got_the_same() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, 2), "own")
    generate(kept, "aabé", sampled(4), "own")
    generate(kept, "aabé", sampled(5), "fork")
    assert generate(kept, "aabébaé", sampled(5), "fork") == [1, 1, 2, 6, 4, 6]
    context = kept.find_given(pack(1, 1, 2, 6, 4, 6), "own")
    assert context is not None
    segment, length = context
    assert isinstance(segment, Response)
    assert (unpack(context_ids(context)), length) == ([1, 1, 2, 6, 4], 1)
