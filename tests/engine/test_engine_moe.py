"""Routed experts: a fixed function of token, position and layer."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from slime_engine.moe import encode_experts, routed_experts
from slime_engine.settings import Settings


@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (2, 2), (6, 6), (64, 8), (128, 8), (97, 4)])
def test_a_token_uses_different_experts_of_those_there_are(experts: int, topk: int) -> None:
    settings = Settings(moe_layers=3, moe_experts=experts, moe_topk=topk)
    routed = routed_experts(list(range(40)), 0, settings)
    assert routed.shape == (39, 3, topk)
    assert routed.dtype == np.int32
    assert routed.min() >= 0
    assert routed.max() < experts
    assert all(len(set(row)) == topk for row in routed.reshape(-1, topk).tolist())


def test_experts_follow_from_token_position_and_layer_alone() -> None:
    settings = Settings(moe_layers=4, moe_experts=64, moe_topk=4)
    whole = routed_experts([5, 6, 7, 8, 9], 0, settings)
    assert (routed_experts([1, 6, 2, 8, 3], 0, settings)[1] == whole[1]).all()
    assert (routed_experts([5, 6, 7, 8, 9], 2, settings) == whole[2:]).all()
    assert (routed_experts([6, 5, 7], 0, settings)[:2] != whole[:2]).any()
    assert len({tuple(layer) for layer in whole[0].tolist()}) == 4


def test_the_wire_form_is_base64_of_little_endian_int32() -> None:
    routed = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    raw = base64.b64decode(encode_experts(routed), validate=True)
    assert raw == b"".join(number.to_bytes(4, "little") for number in range(6))
