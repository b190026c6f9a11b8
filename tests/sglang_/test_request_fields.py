"""Fields that a record is not exact for."""

from __future__ import annotations

from typing import Any

import pytest

from slime_sglang.request_fields import unknown_field

#: Fields that slime and SGLang's own clients send.
USUAL: dict[str, Any] = {
    "input_ids": [1, 2],
    "sampling_params": {"temperature": 1.0, "max_new_tokens": 8, "stop": ["a"], "no_stop_trim": True},
    "return_logprob": True,
    "return_routed_experts": True,
    "lora_path": "adapter",
    "stream": True,
    "rid": "r",
}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, None),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
        ({"positional_embed_overrides": None}, None),
        ({"custom_logit_processor": "x", "unheard_of": 1}, "custom_logit_processor"),
        ({"return_something_new": True}, None),
        ({"max_thinking_tokens": 3}, "max_thinking_tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"sampling_params": [{"n": 1}, {"custom_params": {"a": 1}}]}, "custom_params"),
        ({"sampling_params": {"custom_params": None}}, None),
        ({"sampling_params": None}, None),
        ({"image_data": [], "video_data": [], "audio_data": []}, None),
        ({"image_data": ["image.png"]}, "image_data"),
        ({"positional_embed_overrides": []}, "positional_embed_overrides"),
    ],
)
def test_the_first_field_that_is_not_known_is_named(more: dict[str, Any], name: str | None) -> None:
    assert unknown_field({**USUAL, **more}) == name
