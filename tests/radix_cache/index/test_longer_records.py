"""Records of one response stay together, whichever of them is removed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slime_radix_cache.index.longer_records import LongerRecords

#: A record: the number of its response, and its length.
RECORDS = st.tuples(st.integers(0, 1), st.integers(1, 5))


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), RECORDS, RECORDS), max_size=30))
def test_records_are_those_of_a_plain_model(
    steps: list[tuple[bool, tuple[int, int], tuple[int, int]]],
) -> None:
    records: LongerRecords[tuple[int, int]] = LongerRecords(lambda record: record[1])
    groups: list[set[tuple[int, int]]] = []
    for adds, one, other in steps:
        part, whole = sorted([one, (one[0], other[1])])
        if adds and part != whole:
            found = [group for group in groups if part in group or whole in group]
            together = {part, whole}.union(*found)
            assert records.add(part, whole) == (together not in groups)
            groups = [*(group for group in groups if group not in found), together]
        elif not adds:
            records.remove(one)
            groups = [left for group in groups if len(left := group - {one}) > 1]
        for group in groups:
            ordered = sorted(group)
            for place, record in enumerate(ordered):
                assert records.all_of(record) == ordered
                assert records.parts_of(record) == ordered[:place]
                assert records.longest(record) == ordered[-1]
                assert (record in records) == (place < len(ordered) - 1)
        assert len(records) == sum(map(len, groups))  # nothing else is kept


def test_of_equally_long_records_the_one_added_as_longer_counts() -> None:
    records: LongerRecords[str] = LongerRecords(len)
    assert records.add("ab", "AB")
    assert records.longest("ab") == "AB"
    assert records.parts_of("single") == []
