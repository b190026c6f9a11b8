"""The radix index of one tier."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tiered_store.errors import StaleMatch
from slime_tiered_store.index import POLICIES, MatchResult, PathKeys, RadixNode, RadixTreeIndex
from slime_tiered_store.keys import Namespace, SequenceMeta

ROOT = Namespace("m").root_key(2, 1)


def sequence(*tokens: int) -> SequenceMeta:
    return SequenceMeta(ROOT, tokens, 2)


class Index(RadixTreeIndex):
    """An index that also numbers the blocks that it is given."""

    def __init__(self, policy: str = "lru") -> None:
        super().__init__(2, policy)
        self.next_id = 0

    def match(self, *tokens: int) -> MatchResult:
        return self.match_prefix(sequence(*tokens))

    def add(self, *tokens: int, ready: bool = True) -> RadixNode:
        """Insert the unknown blocks of a sequence."""
        whole = sequence(*tokens)
        match = self.match_prefix(whole, update_cache_info=False)
        count = whole.num_blocks - match.num_matched_blocks
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        return self.insert(whole, ids, match, b"c" * 8 * count, is_ready=ready)


def ids(blocks: list[Any]) -> list[int]:
    return [block.id for block in blocks]


def test_a_tail_is_one_leaf() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, 5, 6, 7)
    assert (leaf.size(), leaf.physical_blocks.tolist(), len(list(index.nodes()))) == (4, [0, 1, 2, 3], 1)
    match = index.match(1, 2, 3, 4, 5, 6, 7)
    assert (match.num_matched_blocks, match.num_ready_matched_blocks) == (4, 4)
    assert ids(match.blocks(1, 3)) == [1, 2]
    assert match.checksums() == b"c" * 32


def test_a_short_last_block_matches_only_itself() -> None:
    index = Index()
    index.add(1, 2, 3)
    assert index.match(1, 2, 3).num_matched_blocks == 2
    assert index.match(1, 2, 3, 4).num_matched_blocks == 1
    assert index.match(1, 2, 4).num_matched_blocks == 1


def test_the_new_node_of_a_split_is_the_prefix() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, 5, 6)
    index.lock(leaf)
    fork = index.add(1, 2, 3, 4, 7, 8)
    prefix = leaf.parent
    assert prefix is not None
    assert fork.parent is prefix
    assert (prefix.physical_blocks.tolist(), leaf.physical_blocks.tolist()) == ([0, 1], [2])
    assert (prefix.lock_cnt, leaf.lock_cnt) == (1, 1)
    assert ids(index.match(1, 2, 3, 4, 5, 6).blocks(0, 3)) == [0, 1, 2]
    path, whole = PathKeys(leaf), sequence(1, 2, 3, 4, 5, 6)
    assert [path.key(at) for at in range(len(path))] == whole.keys(0, 3)


def test_a_lock_protects_the_whole_path() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, 5, 6)
    index.lock(leaf)
    fork = index.add(1, 2, 7, 8)
    assert index.num_evictable_blocks == 1
    assert ids(index.evict(100)) == [3]
    assert fork.is_detached
    assert index.unlock(leaf) == []
    assert index.num_evictable_blocks == 3
    assert sorted(ids(index.evict(100))) == [0, 1, 2]
    with pytest.raises(ValueError, match="not locked"):
        index.unlock(leaf)


def test_ready_blocks_are_counted_up_to_the_first_unready_one() -> None:
    index = Index()
    index.add(1, 2)
    leaf = index.add(1, 2, 3, 4, ready=False)
    match = index.match(1, 2, 3, 4)
    assert (match.num_matched_blocks, match.num_ready_matched_blocks, match.unready_node) == (2, 1, leaf)
    index.set_ready(leaf)
    assert index.match(1, 2, 3, 4).num_ready_matched_blocks == 2
    with pytest.raises(ValueError, match="ready already"):
        index.set_ready(leaf)


def test_unready_source_blocks_are_neither_extended_nor_evicted() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, ready=False)
    for tokens in ((1, 2, 3, 4, 5, 6), (1, 2, 7, 8)):
        with pytest.raises(StaleMatch, match="not ready"):
            index.add(*tokens)
    assert index.evict(10) == []
    assert ids(index.discard(leaf)) == [0, 1]
    assert (index.num_blocks, list(index.nodes())) == (0, [])


def test_no_hole_is_left_after_the_abort_of_a_node_beside_a_split() -> None:
    """An aborted node has no children, and a node that was split is ready: so an abort removes a leaf."""
    index = Index()
    index.add(1, 2, 3, 4)
    leaf = index.add(1, 2, 3, 4, 5, 6, ready=False)
    index.add(1, 2, 7, 8)
    assert ids(index.discard(leaf)) == [2]
    assert index.match(1, 2, 3, 4, 5, 6).num_ready_matched_blocks == 2
    with pytest.raises(ValueError, match="unready"):
        index.discard(index.add(9, 9))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.evict(100),
        lambda index: index.evict(1),
        lambda index: index.reset(),
        lambda index: index.add(1, 2, 9, 9),
        lambda index: index.add(1, 2, 3, 4, 5, 6),
    ],
    ids=["evicted", "shrunk", "reset", "split", "inserted"],
)
def test_a_stale_match_is_refused_whole(change: Callable[[Index], object]) -> None:
    index = Index()
    index.add(1, 2, 3, 4)
    whole = sequence(1, 2, 3, 4, 5, 6)
    match = index.match_prefix(whole)
    change(index)
    before = index.num_blocks
    with pytest.raises(StaleMatch):
        index.insert(whole, [77], match, b"c" * 8)
    assert index.num_blocks == before
    assert 77 not in [each for node in index.nodes() for each in node.physical_blocks]


@pytest.mark.parametrize(("blocks", "checksums"), [([], b""), ([1, 2, 3], b"c" * 24), ([1], b"c")], ids=str)
def test_blocks_that_do_not_fit_the_sequence_are_refused(blocks: list[int], checksums: bytes) -> None:
    index = Index()
    with pytest.raises(ValueError, match="do not fit"):
        index.insert(sequence(1, 2, 3), blocks, index.match(1, 2, 3), checksums)


def test_a_collision_of_keys_is_no_match() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, 5, 6)
    leaf.tokens[:] = sequence(1, 2, 8, 9, 5, 6).token_bytes
    match = index.match(1, 2, 3, 4, 5, 6)
    assert (match.num_matched_blocks, match.collides) == (1, True)
    leaf.tokens[:] = sequence(8, 9, 8, 9, 5, 6).token_bytes
    match = index.match(1, 2, 3, 4, 5, 6)
    assert (match.num_matched_blocks, match.collides) == (0, True)
    with pytest.raises(StaleMatch, match="other tokens"):
        index.insert(sequence(1, 2, 3, 4, 5, 6), [7, 8, 9], match, b"c" * 24)


def test_a_short_block_does_not_match_a_longer_one_with_its_key() -> None:
    """A collision of keys, played by tokens that are missing."""
    index = Index()
    leaf = index.add(1, 2, 3, 4)
    del leaf.tokens[-4:]
    match = index.match(1, 2, 3, 4, 5, 6)
    assert (match.num_matched_blocks, match.collides) == (1, True)


def test_a_leaf_is_shrunk_from_its_end() -> None:
    index = Index()
    leaf = index.add(1, 2, 3, 4, 5, 6, 7)
    assert ids(index.evict(2)) == [2, 3]
    assert index.match(1, 2, 3, 4, 5, 6, 7).num_matched_blocks == 2
    with pytest.raises(ValueError, match="cannot be removed"):
        index.shrink(leaf, 2)
    with pytest.raises(ValueError, match="cannot be split"):
        index.split(leaf, 2)


def test_a_reset_leaves_blocks_in_use_to_their_users() -> None:
    index = Index()
    locked = index.add(1, 2, 3, 4)
    index.lock(locked)
    index.add(1, 2, 5, 6)
    writing = index.add(7, 8, ready=False)
    failing = index.add(9, 9, ready=False)
    assert ids(index.reset()) == [2]
    assert index.match(1, 2).num_matched_blocks == 0
    again = index.add(1, 2)
    assert sorted(ids(index.unlock(locked))) == [0, 1]
    assert ids(index.set_ready(writing)) == [3]
    assert ids(index.discard(failing)) == [4]
    assert list(index.nodes()) == [again]
    assert index.num_blocks == 1


def test_detached_blocks_keep_the_prefix() -> None:
    index = Index()
    index.add(1, 2, 3, 4, 5, 6)
    leaf = index.add(1, 2, 3, 4, 5, 6, 7, 8)
    (first,) = index.root.children.values()
    assert sorted(ids(index.detach(first, 1))) == [1, 2, 3]
    assert index.match(1, 2, 3, 4).num_matched_blocks == 1
    assert index.detach(leaf) == []
    assert index.detach(index.root) == []


def test_a_discarded_node_that_is_locked_frees_its_blocks_later() -> None:
    index = Index()
    leaf = index.add(1, 2, ready=False)
    index.lock(leaf)
    assert index.discard(leaf) == []
    assert ids(index.unlock(leaf)) == [0]


ORDERS = {
    "lru": [0, 2, 3, 1],
    "mru": [1, 3, 2, 0],
    "fifo": [0, 1, 2, 3],
    "filo": [3, 2, 1, 0],
    "lfu": [0, 3, 1, 2],
    "slru": [0, 2, 3, 1],
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_evict_in_their_order(policy: str) -> None:
    index = Index(policy)
    for token in range(4):
        index.add(token, token)
    for hit in (2, 2, 2, 3, 1, 1):
        index.match(hit, hit)
    assert [ids(index.evict(1))[0] for _ in range(4)] == ORDERS[policy]


def test_slru_evicts_a_newer_node_without_a_hit_first() -> None:
    index = Index("slru")
    index.add(1, 1)
    index.match(1, 1)
    index.add(2, 2)
    assert ids(index.evict(1)) == [1]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'arc': use one of lru, lfu, fifo, mru, filo, slru"):
        RadixTreeIndex(2, "arc")


def test_a_match_without_update_counts_no_hit() -> None:
    index = Index()
    index.add(1, 1)
    index.add(2, 2)
    index.match_prefix(sequence(1, 1), update_cache_info=False)
    assert ids(index.evict(1)) == [0]


def test_eviction_tells_what_goes_before_it_goes() -> None:
    index = Index()
    index.add(1, 2, 3, 4, 5, 6)
    told: list[tuple[int, int]] = []
    index.evict(2, lambda node, start: told.append((node.size(), start)))
    assert told == [(3, 1)]


def allocated(call: Callable[[], object]) -> int:
    """Return the most memory that was in use during a call, in bytes: at least the size of the largest copy."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_eviction_and_a_lookup_copy_nothing_that_stays() -> None:
    """Counted in bytes that are allocated. The keys alone of the node have 160,000."""
    index, whole = Index(), sequence(*range(20_000))
    leaf = index.add(*range(20_000))
    assert allocated(lambda: index.match_prefix(whole)) < 40_000
    assert allocated(lambda: index.evict(1)) < 40_000
    assert allocated(lambda: PathKeys(leaf).key(9_000)) < 40_000
    assert (leaf.size(), index.match_prefix(whole).num_matched_blocks) == (9_999, 9_999)


@pytest.mark.parametrize("shared", [6, 19_990])
def test_a_split_copies_only_the_shorter_part(shared: int) -> None:
    index, fork = Index(), sequence(*range(shared), 7, 7)
    index.add(*range(20_000))
    match = index.match_prefix(fork)
    assert allocated(lambda: index.insert(fork, [20_000], match, b"c" * 8)) < 40_000
    assert ids(index.match(*range(20_000)).blocks(0, 10_000)) == list(range(10_000))
    assert index.match_prefix(fork).num_matched_blocks == fork.num_blocks


def test_eviction_does_not_look_at_other_leaves() -> None:
    """Counted in priorities that are compared, since time says nothing on a busy machine."""
    compared = 0

    class Priority(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int.__lt__(self, other)

    POLICIES["counted"] = lambda node: Priority(node.last_access_time)
    try:
        index = Index("counted")
        for token in range(5_000):
            index.add(token, token)
        compared = 0
        index.evict(1)
    finally:
        del POLICIES["counted"]
    assert 0 < compared < 40


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(POLICIES)))
def test_the_index_is_a_set_of_prefixes(data: st.DataObject, policy: str) -> None:
    """Against a plain dict of the blocks by their whole prefix."""
    index, plain = Index(policy), dict[tuple[int, ...], int]()
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
        prefixes = [tokens[:end] for end in range(2, len(tokens) + 2, 2)]
        match = index.match(*tokens)
        known = [plain[each] for each in prefixes if each in plain]
        assert ids(match.blocks(0, match.num_matched_blocks)) == known
        if data.draw(st.booleans()) and len(known) < len(prefixes):
            leaf = index.add(*tokens)
            plain |= dict(zip(prefixes[len(known) :], leaf.physical_blocks, strict=True))
        else:
            count = data.draw(st.integers(0, 4))
            gone = ids(index.evict(count))
            assert len(gone) == min(count, len(plain))
            plain = {prefix: block for prefix, block in plain.items() if block not in gone}
            assert all(prefix[:-2] in plain for prefix in plain if len(prefix) > 2 and len(prefix) % 2 == 0)
        assert index.num_blocks == len(plain)
