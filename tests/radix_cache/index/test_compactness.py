"""Objects that segments and nodes share, and sets of one, several and many items."""

from __future__ import annotations

from array import array

import pytest

from radix_cache.direct import generate, read
from radix_cache.toy import EOS, encode, pack, sampled, spell, trajectories
from slime_radix_cache.index.item_sets import MANY, ItemSet, items_of, with_item, without_item


def test_item_set_grows_and_shrinks_item_by_item() -> None:
    group: ItemSet[int] = None
    numbers = list(range(2 * MANY))
    for number in numbers:
        group = with_item(group, number)
        assert list(items_of(group)) == numbers[: number + 1]
    assert isinstance(group, dict)
    for number in (5, 0, 2 * MANY - 1):
        group = without_item(group, number)
        numbers.remove(number)
        assert list(items_of(group)) == numbers
    for number in numbers:
        group = without_item(group, number)
    assert group is None


def test_short_item_set_shrinks_to_its_only_item() -> None:
    group: ItemSet[int] = without_item(with_item(with_item(1, 2), 3), 2)
    assert group == (1, 3)
    assert without_item(group, 3) == 1
    assert without_item(1, 1) is None


@pytest.mark.parametrize("group", [None, 1, (1, 2), {1: None}])
def test_absent_item_cannot_be_removed(group: ItemSet[int]) -> None:
    with pytest.raises((ValueError, KeyError)):
        without_item(group, 3)


def test_responses_of_a_session_share_its_name_and_their_tail() -> None:
    kept = trajectories()
    for text in ("a", "ab", "b"):
        generate(kept, text, sampled(1, EOS), "".join(["o", "n", "e"]))
    first, *others = kept.responses_of("one")
    assert len(others) == 2
    for other in others:
        assert other.session is first.session
        assert other.end is not first.end
        assert other.end.edge is first.end.edge


def test_responses_share_the_fields_that_are_equal() -> None:
    kept = trajectories()
    for text, answer in (("a", sampled(1, EOS)), ("ab", sampled(2, EOS)), ("b", sampled(1, version="2"))):
        generate(kept, text, answer, "one")
    first, second, third = kept.responses_of("one")
    assert first.fields is second.fields
    first.continuation_lost = True
    assert (first.continuation_lost, second.continuation_lost) == (True, False)
    assert (first.versions, second.versions, third.versions) == (((None, 2),), ((None, 2),), (("2", 1),))
    third.continuation_lost = True
    third.continuation_lost = False
    assert third.versions == (("2", 1),)


@pytest.mark.parametrize("kind", ["f", "d", None])
def test_ids_and_logprobs_of_a_response_come_back_bit_for_bit(kind: str | None) -> None:
    kept = trajectories()
    values = array(kind, [-0.1, -1e-300 if kind == "d" else -1e-30, 0.0]) if kind is not None else None
    logprobs = values.tobytes() if values is not None else None
    generate(kept, "a", sampled(1, 2, EOS)._replace(logprobs=logprobs), "one")
    [response] = kept.responses_of("one")
    assert (len(response), response.ids, response.logprobs) == (3, pack(1, 2, EOS), logprobs)
    assert (response.has_wide_logprobs, response.is_sound) == (kind == "d", kind is not None)
    assert response.visible == 2
    if values is not None:
        assert response.logprob_array(3).tolist() == values.tolist()
        wide = array("d", values)
        assert response.packed_logprobs(2, wide=True) == wide[:2].tobytes()
        assert response.packed_logprobs(2, wide=False) == array("f", wide[:2]).tobytes()


def test_node_keeps_responses_that_begin_there_and_that_pass_it() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1, 2, 1), "one")
    [passing] = kept.responses_of("one")
    node = passing.node
    assert (node.begun, list(node.through)) == (None, [passing])
    for token in (2, 3):
        generate(kept, "a" + spell([1, 2, 1]), sampled(token), "one")
    _, *begun = kept.responses_of("one")
    assert (list(node.begins), list(node.through)) == (begun, [passing])
    for response in begun:
        kept.withdraw(response)
    assert (node.begun, list(node.through)) == (None, [passing])


def test_session_of_one_two_and_one_responses_is_kept() -> None:
    kept = trajectories()
    generate(kept, "a", sampled(1), "one")
    [first] = kept.responses_of("one")
    generate(kept, "b", sampled(2), "one")
    second = kept.responses_of("one")[-1]
    assert kept.responses_of("one") == [first, second]
    kept.withdraw(first)
    assert kept.responses_of("one") == [second]
    kept.withdraw(second)
    assert kept.responses_of("one") == []
    assert "one" not in kept._sessions


def test_nodes_of_equal_depth_share_the_number_and_deep_ones_are_found() -> None:
    kept = trajectories()
    long = "a" * 300
    for text in (long, "b" + long[1:]):
        generate(kept, text, sampled(2, EOS))
    one, two = (kept.find_to_read(text.encode()).context for text in (long + "b", "b" + long[1:] + "b"))
    assert one is not None
    assert two is not None
    assert one[0].node is not two[0].node
    assert one[0].node.depth is two[0].node.depth

    deep = "ab" * 10_000
    generate(kept, deep, sampled(1, EOS))
    assert read(kept, deep + "a") == ([*encode(deep), 1, EOS], [0] * 10_000 + [1, 1], None)


def test_wide_fork_loses_its_children_one_by_one() -> None:
    kept = trajectories()
    texts = ["a", "b", "é", "<", "e", ">"]
    for text in texts:
        generate(kept, text, sampled(1), text)
    root = kept._index.root
    while len(texts) > 1:
        gone = texts.pop(len(texts) // 2)
        kept.forget(gone)
        assert sorted(kid.edge[:1] for kid in root.all_kids) == sorted(text.encode()[:1] for text in texts)
        for text in texts:
            assert read(kept, text + "a", text)[2] is None
    assert root.all_kids == (root.kids,)
