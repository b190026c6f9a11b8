"""Ranges of keys, compared with a set."""

from __future__ import annotations

from random import Random

import pytest

from slime_radix_cache.demotion.key_ranges import KeyRanges


@pytest.mark.parametrize("seed", range(5))
def test_ranges_have_the_keys_of_a_set(seed: int) -> None:
    random = Random(seed)
    ranges, model = KeyRanges(), set[int]()
    edge = (1 << 128) - 1
    numbers = [*range(60), edge - 1, edge]
    for number in random.choices(numbers, k=150):
        ranges.update([number.to_bytes(16, "big")])
        model.add(number)
        assert [each for each in numbers if each.to_bytes(16, "big") in ranges] == sorted(model)
        assert len(ranges) == sum(each - 1 not in model for each in model)
    ranges.update(each.to_bytes(16, "big") for each in numbers)
    assert len(ranges) == 2
