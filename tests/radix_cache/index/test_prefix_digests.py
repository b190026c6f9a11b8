"""Digests of known sequences, found along a given one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from slime_radix_cache.index.prefix_digests import PrefixDigests, extended

#: More values than are read in one step, twice.
SIZE = 70_000
LENGTHS = [0, 1, 5, 2**15 - 1, 2**15, 2**15 + 1, 2**16, SIZE]


@pytest.mark.parametrize(("kind", "most"), [("int32", 2**31 - 1), ("int32", 3), ("uint8", 255)])
def test_known_prefixes_are_found_at_their_lengths(kind: str, most: int) -> None:
    some = random.Random(1)
    values = np.array([some.randint(0, most) for _ in range(SIZE)], kind)
    other = values.copy()
    other[2] ^= 1
    known = {length: extended(0, values[:length].tobytes(), kind) for length in LENGTHS}
    digests = PrefixDigests(kind)
    for length, digest in known.items():
        digests.add(digest, int(values[length - 1]) if length else 0)

    def found(given: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
        """Return the known prefixes of ``given``: the search may also return other prefixes, but rarely does."""
        return [one for one in digests.along(given.tobytes()) if one[1] in known.values()]

    assert found(values) == list(known.items())
    assert found(values[:10]) == [(length, known[length]) for length in (0, 1, 5)]
    assert found(other) == [(length, known[length]) for length in (0, 1)]
    digests.remove(known[5], int(values[4]))
    assert [length for length, _ in found(values)] == [length for length in LENGTHS if length != 5]


def test_digest_of_a_longer_sequence_follows_from_its_beginning() -> None:
    values = np.arange(100, dtype=np.int32).tobytes()
    assert extended(extended(0, values[:80], "int32"), values[80:], "int32") == extended(0, values, "int32")
