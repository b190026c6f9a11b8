"""Block keys and the bytes of a block."""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from slime_tiered_store.errors import BlockCorrupt
from slime_tiered_store.frames import Layout
from slime_tiered_store.keys import Namespace, SequenceMeta

ROOT = Namespace("m").root_key(4, 16)


def test_a_key_covers_the_whole_prefix() -> None:
    one = SequenceMeta(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    other = SequenceMeta(ROOT, [9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert one.key(1) != other.key(1)
    assert SequenceMeta(ROOT, [1, 2, 3, 4], 4).key(0) == one.key(0)
    assert one.key(-1) == ROOT


def test_keys_are_chained_xxh3_128_digests_that_never_change() -> None:
    """Else a router of a later version would not find what an earlier one has stored."""
    framed = b"".join(
        len(field).to_bytes(8, "little") + field
        for field in (b"slime tiered store 1", b"m", b"a", b"7", b"f32", b"rows", b"v")
    )
    root = xxh3_128_digest(framed + struct.pack("<QQ", 4, 16))
    assert Namespace("m", "a", "7", "f32", "rows", "v").root_key(4, 16) == root
    first = xxh3_128_digest(root + struct.pack("<4i", 1, 2, 3, 4))
    second = xxh3_128_digest(first + struct.pack("<2i", 5, 6))
    assert SequenceMeta(root, [1, 2, 3, 4, 5, 6], 4).block_hashes == first + second


def test_a_short_last_block_has_its_own_key() -> None:
    short = SequenceMeta(ROOT, [1, 2, 3, 4, 5], 4)
    padded = SequenceMeta(ROOT, [1, 2, 3, 4, 5, 0, 0, 0], 4)
    assert (short.num_blocks, short.length(1), short.length(2)) == (2, 4, 5)
    assert short.key(0) == padded.key(0)
    assert short.key(1) != padded.key(1)


def test_an_empty_sequence_has_no_blocks() -> None:
    assert SequenceMeta(ROOT, [], 4).num_blocks == 0


@given(
    st.lists(st.text(max_size=3), min_size=6, max_size=6),
    st.lists(st.text(max_size=3), min_size=6, max_size=6),
)
def test_two_namespaces_never_share_a_root(one: list[str], other: list[str]) -> None:
    assert (Namespace(*one).root_key(4, 8) == Namespace(*other).root_key(4, 8)) is (one == other)


def test_namespace_fields_are_framed() -> None:
    roots = {
        Namespace("ab", "c").root_key(4, 8),
        Namespace("a", "bc").root_key(4, 8),
        Namespace("ab", "", "c").root_key(4, 8),
        Namespace("ab", "c").root_key(8, 8),
        Namespace("ab", "c").root_key(4, 4),
    }
    assert len(roots) == 5


def test_stale_data_after_a_weight_update_is_not_found() -> None:
    before = SequenceMeta(Namespace("m", weight_version="7").root_key(4, 16), [1, 2, 3, 4], 4)
    after = SequenceMeta(Namespace("m", weight_version="8").root_key(4, 16), [1, 2, 3, 4], 4)
    assert before.key(0) != after.key(0)


@pytest.mark.parametrize(
    "tokens", [[[1, 2]], [1.5], [-1], [2**31], np.array([True]), ["1"], [2**63]], ids=str
)
def test_tokens_that_are_none_are_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match=r"token.?ids must be"):
        SequenceMeta(ROOT, tokens, 4)  # type: ignore[arg-type]  # what a caller may do wrong


@pytest.mark.parametrize("size", [0, -4, 3, 12])
def test_a_block_size_that_is_no_power_of_two_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        SequenceMeta(ROOT, [1], size)
    with pytest.raises(ValueError, match="power of two"):
        Layout(size, 1)


def test_rows_have_at_least_a_byte() -> None:
    with pytest.raises(ValueError, match="positive"):
        Layout(4, 0)


# frames

LAYOUT = Layout(4, 3)
SEQUENCE = SequenceMeta(ROOT, [1, 2, 3, 4, 5, 6], 4)
ROWS = memoryview(bytes(range(18)))


def frames() -> list[memoryview]:
    memory = memoryview(bytearray(b"\xff" * LAYOUT.block_bytes * SEQUENCE.num_blocks))
    LAYOUT.write([memory], SEQUENCE, 0, LAYOUT.checksums(ROWS), ROWS)
    return LAYOUT.frames([memory])


@pytest.mark.parametrize("num_tokens", [1, 4, 6, 8, 21, 24])
@pytest.mark.parametrize("lengths", [(6,), (1, 1, 1, 1, 1, 1), (1, 2, 3), (4, 1, 1)])
def test_blocks_in_any_stretches_have_the_same_bytes(num_tokens: int, lengths: tuple[int, ...]) -> None:
    """A put of the blocks after those that the memory tier has fills the same bytes, however its memory lies."""
    sequence = SequenceMeta(ROOT, range(1, num_tokens + 1), 4)
    data = memoryview(bytes(range(3 * num_tokens)))
    checksums = LAYOUT.checksums(data)
    for start in range(sequence.num_blocks):
        ends = [min(end, sequence.num_blocks - start) for end in accumulate(lengths)]
        stretches = [
            memoryview(bytearray(LAYOUT.block_bytes * (end - begin)))
            for begin, end in pairwise([0, *ends])
            if begin < end
        ]
        LAYOUT.write(stretches, sequence, start, checksums, data)
        for block, frame in enumerate(LAYOUT.frames(stretches), start):
            tokens = sequence.tokens(block, block + 1)
            header = sequence.key(block - 1) + checksums[8 * block : 8 * block + 8]
            header += (len(tokens) // 4).to_bytes(4, "little") + bytes(4) + tokens.ljust(16, b"\0")
            rows_of_block = bytes(data[12 * block : 12 * block + 12])
            assert bytes(frame) == (header + rows_of_block).ljust(LAYOUT.block_bytes, b"\0")


def test_a_frame_gives_back_its_rows() -> None:
    one, two = frames()
    assert bytes(LAYOUT.rows(one)) + bytes(LAYOUT.rows(two)) == bytes(ROWS)
    checksums = LAYOUT.checksums(ROWS)
    assert LAYOUT.verify("ssd", one, SEQUENCE.key(0), SEQUENCE.tokens(0, 1)) == checksums[:8]
    assert LAYOUT.verify("ssd", two, SEQUENCE.key(1), SEQUENCE.tokens(1, 2)) == checksums[8:]


@pytest.mark.parametrize("at", [*range(LAYOUT.rows_offset + 12)])
def test_each_changed_byte_of_a_frame_is_found(at: int) -> None:
    frame = frames()[0]
    frame[at] ^= 1
    with pytest.raises(BlockCorrupt, match=SEQUENCE.key(0).hex()):
        LAYOUT.verify("ssd", frame, SEQUENCE.key(0), SEQUENCE.tokens(0, 1))


def test_another_block_in_its_place_is_found() -> None:
    with pytest.raises(BlockCorrupt, match="another block"):
        LAYOUT.verify("ssd", frames()[1], SEQUENCE.key(0), SEQUENCE.tokens(0, 1))


def test_frame_is_compared_with_the_known_tokens_and_checksum() -> None:
    frame, tokens = frames()[1], SEQUENCE.tokens(1, 2)
    checksum = LAYOUT.checksums(ROWS)[8:]
    assert LAYOUT.holds(frame, tokens, checksum)
    assert LAYOUT.holds(frame, tokens, b"")
    assert not LAYOUT.holds(frame, tokens, bytes(8))
    assert not LAYOUT.holds(frame, SEQUENCE.tokens(0, 1), checksum)
    assert not LAYOUT.holds(frame, tokens[:4], checksum)


def test_other_tokens_with_the_same_key_are_found() -> None:
    """A collision of the digest, played by tokens that the caller asks for."""
    with pytest.raises(BlockCorrupt, match="other tokens"):
        LAYOUT.verify("ssd", frames()[0], SEQUENCE.key(0), b"\0" * 16)
