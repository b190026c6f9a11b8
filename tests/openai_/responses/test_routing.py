"""Routed experts of each sampled token, cut out of the rows of all."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from slime_openai.responses.outputs import Output
from slime_openai.responses.routing import routing_matrices


def an_output(rows: int, *, size: int = 8, **meta: Any) -> Output:
    """Three tokens after a prompt of four; row ``i`` is ``size`` bytes ``i``."""
    told = b"".join(bytes([row]) * size for row in range(rows))
    output = Output()
    output.take(
        {
            "text": "",
            "output_ids": [1, 2, 3],
            "meta_info": {
                "prompt_tokens": 4,
                "completion_tokens": 3,
                "routed_experts": base64.b64encode(told).decode(),
                **meta,
            },
        }
    )
    return output


def read(matrices: list[str] | None) -> list[bytes]:
    assert matrices is not None
    return [base64.b64decode(matrix) for matrix in matrices]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 12, 24, 32])
def test_a_token_has_the_row_of_the_one_before_it(size: int) -> None:
    assert read(routing_matrices(an_output(6, size=size), 0)) == [bytes([row]) * size for row in (3, 4, 5)]


@pytest.mark.parametrize("meta", [{}, {"routed_experts_start_len": 5}])
def test_rows_that_were_left_out_are_empty(meta: dict[str, Any]) -> None:
    """The worker's own word for where they begin comes before the client's."""
    start = 0 if meta else 5
    assert read(routing_matrices(an_output(1, **meta), start)) == [b"", b"", bytes(8)]


@pytest.mark.parametrize(
    "output",
    [
        an_output(6, routed_experts=None),
        an_output(6, routed_experts="no base64!"),
        an_output(6, routed_experts="\N{SNOWMAN}" * 16),
        an_output(6, routed_experts=""),
        an_output(5, size=7),
        an_output(6, prompt_tokens=None),
        an_output(6, prompt_tokens=-2),
    ],
    ids=["none", "no base64", "no letters", "empty", "half a row", "no count", "no rows"],
)
def test_rows_that_do_not_fit_are_not_cut(output: Output) -> None:
    assert routing_matrices(output, 0) is None
