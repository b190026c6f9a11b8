"""The file of many samples, byte for byte as the library safetensors makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from slime_rows.body_pieces import BodyLength, Piece, RowPiece
from slime_rows.rows import Rows
from slime_sessions.samples import ROWS, Sample
from slime_sessions.wire import encode


class RowsAtHand:
    """``FoundRows`` for the encoder alone, which reads nothing."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype


def body_of(pieces: Iterator[Piece]) -> Iterator[bytes]:
    """The bytes of ``pieces``, with two rows at a time."""
    for piece in pieces:
        if isinstance(piece, RowPiece):
            found: Any = piece.rows.found
            for start in range(0, len(found.values), 2):
                yield from map(bytes, piece.encode(found.values[start : start + 2]))
        elif not isinstance(piece, BodyLength):
            yield bytes(piece)


@pytest.mark.parametrize("count", [0, 1, 12])
def test_tensors_are_in_the_order_of_the_library(count: int) -> None:
    """Twelve: tokens.10 comes before tokens.2."""
    samples = []
    for number in range(count):
        tokens = np.arange(number + 2)
        values = [np.full((number + 1, 3, 2), number, kind) for kind in (np.uint8, np.uint16)]
        rows = [Rows(name, RowsAtHand(each), None) for name, each in zip(ROWS, values, strict=True)]  # type: ignore[arg-type]  # see RowsAtHand
        if number % 3 == 2:
            rows[0].lose("not_in_store")
        mask, logprobs = np.ones(1, np.uint8), np.zeros(1)
        samples.append(Sample(tokens, "é", mask, logprobs, "completed", [], {"node_id": number}, rows))
    first, *others = encode(samples, {})
    body = b"".join(body_of(iter(others)))
    assert first == len(body)
    tensors = safetensors.numpy.load(body)
    assert safetensors.numpy.save(tensors) == body
    assert len(tensors) == 1 + 5 * count - count // 3
    for number, sample in enumerate(samples):
        assert tensors[f"tokens.{number}"].tolist() == sample.tokens.tolist()
        shown = tensors[f"rollout_{ROWS[1]}.{number}"]
        assert shown.dtype == np.int32
        assert shown.tolist() == [[[number] * 2] * 3] * (number + 1)
