"""Pools of block ids."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tiered_store.errors import NotEnoughSpaceError
from slime_tiered_store.pool import Mempool


@given(st.integers(0, 300), st.data())
def test_a_pool_is_a_set_of_ids(total: int, data: st.DataObject) -> None:
    pool, used = Mempool(total), set[int]()
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            num = data.draw(st.integers(0, total - len(used)))
            ids = pool.allocate_blocks(num)
            assert len(ids) == num
            assert not used & set(ids)
            used |= set(ids)
        elif used:
            ids = data.draw(st.lists(st.sampled_from(sorted(used)), unique=True))
            pool.recycle_blocks(ids)
            used -= set(ids)
        assert (pool.num_used_blocks, pool.num_free_blocks) == (len(used), total - len(used))
    assert used <= set(range(total))
    assert set(pool.allocate_blocks(total - len(used))) == set(range(total)) - used


def test_too_few_blocks_are_an_error_with_both_numbers() -> None:
    pool = Mempool(5, "ssd")
    pool.allocate_blocks(3)
    with pytest.raises(
        NotEnoughSpaceError, match="tier ssd: 3 blocks are required, 2 are available"
    ) as error:
        pool.allocate_blocks(3)
    assert (error.value.required, error.value.available) == (3, 2)
    assert pool.num_free_blocks == 2


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([0, 3], "free already"), ([0, 1, 0], "given twice"), ([0, 70], "exist"), ([-1], "exist")],
)
def test_double_recycling_is_refused_whole(ids: list[int], reason: str) -> None:
    pool = Mempool(70)
    assert sorted(pool.allocate_blocks(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match=reason):
        pool.recycle_blocks(ids)
    assert pool.num_used_blocks == 3
    pool.recycle_blocks([0, 1, 2])
    assert sorted(pool.allocate_blocks(70)) == list(range(70))


def test_claimed_blocks_are_in_use() -> None:
    pool = Mempool(200)
    pool.claim_blocks([*range(64), 130])
    with pytest.raises(ValueError, match="in use already"):
        pool.claim_blocks([129, 130])
    assert sorted(pool.allocate_blocks(135)) == [*range(64, 130), *range(131, 200)]
    pool.recycle_blocks([5])
    assert pool.allocate_blocks(1) == [5]


@pytest.mark.parametrize("call", [lambda: Mempool(-1), lambda: Mempool(1).allocate_blocks(-1)])
def test_negative_numbers_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="negative"):
        call()  # type: ignore[operator]  # a lambda


def test_a_pool_takes_bits() -> None:
    pool = Mempool(1 << 20)
    held = pool._bits.itemsize * len(pool._bits) + pool._free_words.itemsize * len(pool._free_words)
    assert held * 8 <= 2 * (1 << 20)


class CountedWords(array):  # type: ignore[type-arg]  # of integers
    """Words of bits that count how often one is read or written."""

    uses = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]  # as the base class
        self.uses += 1
        return super().__getitem__(at)

    def __setitem__(self, at, value):  # type: ignore[no-untyped-def]  # as the base class
        self.uses += 1
        super().__setitem__(at, value)


@pytest.mark.parametrize("total", [1 << 10, 1 << 17])
def test_pool_looks_only_at_the_words_of_the_ids(total: int) -> None:
    pool = Mempool(total)
    ids = pool.allocate_blocks(total)
    pool.recycle_blocks([ids[3], ids[-5]])
    pool._bits = words = CountedWords("Q", pool._bits)
    assert sorted(pool.allocate_blocks(2)) == sorted([ids[3], ids[-5]])
    pool.recycle_blocks([ids[700]])
    assert 0 < words.uses < 12
