"""A session that went on from another one's words, and threw its own answer away."""

from __future__ import annotations

import pytest

from radix_cache.direct import generate, read
from radix_cache.toy import EOS, pack, sampled, trajectories, unpack
from slime_radix_cache.index.segments import context_ids
from slime_radix_cache.index.trajectories import Trajectories


@pytest.fixture
def kept() -> Trajectories:
    """``a`` and then ``b``, ``a`` in two tokens, which nobody would write so; a fork goes on from there."""
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, EOS), "origin")
    assert generate(kept, "aabé", sampled(5), "fork") == [1, 1, 2, 6]
    return kept


def test_fork_keeps_the_samples_that_it_continued(kept: Trajectories) -> None:
    assert generate(kept, "aabéa", sampled(6), "fork") == [1, 1, 2, 6, 1]
    assert read(kept, "aabéaé", "fork") == ([1, 1, 2, 6, 1, 6], [0, 1, 1, 0, 0, 1], None)


def test_fork_takes_no_other_samples_of_others(kept: Trajectories) -> None:
    generate(kept, "aabé", sampled(1, 2), "origin")
    assert generate(kept, "aabéabé", sampled(6), "fork") == [1, 1, 2, 6, 3, 6]


def test_given_ids_keep_their_samples_too(kept: Trajectories) -> None:
    context = kept.find_given(pack(1, 1, 2, 6, 1), "fork")
    assert unpack(context_ids(context)) == [1, 1, 2, 6]


def test_session_without_a_fork_takes_no_samples_of_others(kept: Trajectories) -> None:
    generate(kept, "a", sampled(5), "alone")
    assert generate(kept, "aabé", sampled(6), "alone") == [1, 3, 6]
