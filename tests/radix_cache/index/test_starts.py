"""Responses found by the ids before them."""

from __future__ import annotations

from radix_cache.toy import pack, sampled, trajectories
from slime_radix_cache.index.segments import Context, Response
from slime_radix_cache.index.trajectories import Trajectories


def turn(kept: Trajectories, context: Context, text: str, rest: bytes, *ids: int) -> Response:
    response = kept.record(context, rest, text.encode(), sampled(*ids))
    kept.see_version("1")
    return response


def test_every_response_on_the_way_is_found_longest_first() -> None:
    kept = trajectories()
    first = turn(kept, None, "ab", pack(1, 2), 3)
    second = turn(kept, (first, 1), "abab<", pack(7), 4)
    cut = turn(kept, (second, 1), "abab<baa", pack(1), 2)
    turn(kept, None, "ba", pack(2, 1), 3)  # elsewhere
    ids = pack(1, 2, 3, 7, 4, 1, 5)
    assert [(one, place) for one, place in kept._starts.along(ids)] == [(cut, 6), (second, 4), (first, 2)]
    assert [place for _, place in kept._starts.along(pack(1, 2, 3, 7))] == [4, 2]
    assert kept._starts.along(pack(2, 2, 3)) == []


def test_last_search_does_not_outlive_a_change() -> None:
    kept = trajectories()
    ids = pack(1, 2, 3)
    first = turn(kept, None, "ab", pack(1, 2), 3)
    assert kept._starts.along(ids) is kept._starts.along(ids)
    second = turn(kept, None, "ab", pack(1, 2), 4)
    assert [one for one, _ in kept._starts.along(ids)] == [second, first]
    kept.withdraw(second)
    assert [one for one, _ in kept._starts.along(ids)] == [first]
