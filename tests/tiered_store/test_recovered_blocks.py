"""Blocks of an earlier process, compared with a dict."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from slime_tiered_store.recovered_blocks import RecoveredBlocks, repeated

_RANDOM = Random(7)


def keys_of(count: int, ends: int) -> list[bytes]:
    """Keys of which at most ``ends`` have different ends."""
    return [_RANDOM.randbytes(8) + _RANDOM.randrange(ends).to_bytes(8) for _ in range(count)]


def recovered(keys: list[bytes]) -> RecoveredBlocks:
    return RecoveredBlocks(b"".join(keys), range(7, 7 + len(keys)))


@pytest.mark.parametrize("ends", [1 << 64, 40, 1])
def test_blocks_are_those_of_a_dict(ends: int) -> None:
    keys = keys_of(120, ends)
    blocks, model = recovered(keys), {key: number for number, key in enumerate(keys, 7)}
    for step in range(240):
        assert blocks == model
        assert (len(blocks), list(blocks), list(blocks.ids())) == (len(model), [*model], [*model.values()])
        key = _RANDOM.choice(keys)
        assert (key in blocks) == (key in model)
        if key in model:
            assert blocks.take(key) == model.pop(key)
            if step % 3 == 0:
                model[key] = step
                blocks.put_back([(key, step)])
        else:
            assert blocks.take(key) is None
    assert b"no such key....." not in blocks


@pytest.mark.parametrize("ends", [1 << 64, 40, 1])
def test_many_keys_are_searched_at_once(ends: int) -> None:
    keys, others = keys_of(120, ends), keys_of(30, ends)
    blocks = recovered(keys)
    for key in keys[::7]:
        blocks.take(key)
    asked = _RANDOM.sample(keys[:60] + others, 90)
    assert blocks.contains(b"".join(asked)).tolist() == [key in blocks for key in asked]
    assert blocks.without(b"".join(asked)) == [key for key in blocks if key not in asked]
    assert blocks.without(b"") == list(blocks)
    assert not RecoveredBlocks(b"", []).contains(b"".join(asked)).any()
    assert RecoveredBlocks(b"", []).without(b"".join(asked)) == []


@pytest.mark.parametrize("ends", [1 << 64, 40, 1])
def test_of_equal_keys_the_last_counts(ends: int) -> None:
    keys = keys_of(50, ends)
    keys += keys[10:20] + keys[5:15]
    assert sorted(repeated(b"".join(keys[:60]))) == [[number, 40 + number] for number in range(10, 20)]
    assert sorted(map(len, repeated(b"".join(keys)))) == [2] * 10 + [3] * 5
    blocks = recovered(keys)
    assert blocks == {key: number for number, key in enumerate(keys, 7)}
    for key in set(keys):
        blocks.take(key)
    assert (len(blocks), list(blocks)) == (0, [])


def test_block_takes_little_memory() -> None:
    keys, ids = _RANDOM.randbytes(16 * 20_000), list(range(20_000))
    tracemalloc.start()
    blocks = RecoveredBlocks(bytes(bytearray(keys)), ids)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / len(blocks) < 45  # a dict takes 190
