"""Routed experts of real router layers, compared with the library's own pass over the same tokens."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.kinds import Kind
from engine.served import JSONDict
from slime_engine.backend import ExpertsArray
from slime_engine.model import NgramModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from engine.hf.tiny import outputs_of, save_tiny  # noqa: E402  # after the check for torch
from slime_engine.hf.backend import TransformersBackend  # noqa: E402
from slime_engine.hf.weights import Checkpoint  # noqa: E402

pytestmark = pytest.mark.anyio

PROMPT = [70, 101, 40, 7, 300, 44, 81, 12, 500, 9, 33, 77]
LAYERS, TOP_K = 2, 2


@pytest.fixture
def moe(kind: Kind) -> Kind:
    if kind.name in ("ngram", "mistral"):
        pytest.skip("the model has no experts of its own")
    return kind


def body(ids: list[int] = PROMPT, tokens: int = 10, /, **more: Any) -> JSONDict:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 1}
    return {"input_ids": ids, "sampling_params": params, "return_routed_experts": True, **more}


def told(answer: JSONDict) -> ExpertsArray:
    raw = base64.b64decode(answer["meta_info"]["routed_experts"], validate=True)
    return np.frombuffer(raw, "<i4").reshape(-1, LAYERS, TOP_K)


def computed(checkpoint: Path, ids: list[int]) -> ExpertsArray:
    """Return the library's experts of all ``ids``: the largest of its router's logits."""
    logits = outputs_of(checkpoint, ids, output_router_logits=True).router_logits
    layers = [torch.topk(layer.reshape(len(ids), -1), TOP_K).indices.numpy() for layer in logits]
    found: npt.NDArray[np.int32] = np.stack(layers, axis=1).astype(np.int32)
    return found


async def test_experts_are_those_of_the_library(moe: Kind) -> None:
    assert moe.checkpoint is not None
    long = [(7 * place * place + 3 * place) % 1200 for place in range(600)]
    async with moe.serve() as engine:
        assert (await engine.get("/server_info"))["enable_return_routed_experts"] is True
        for prompt in (PROMPT, long, PROMPT[:1]):
            answer = await engine.generate(**body(prompt))
            whole = prompt + answer["output_ids"]
            np.testing.assert_array_equal(told(answer), computed(moe.checkpoint, whole)[:-1])
            later = await engine.generate(**body(prompt, routed_experts_start_len=len(prompt)))
            np.testing.assert_array_equal(told(later), told(answer)[len(prompt) :])


async def test_a_reused_prefix_brings_its_experts(moe: Kind) -> None:
    assert moe.checkpoint is not None
    async with moe.serve() as engine:
        first = await engine.generate(**body())
        turn = PROMPT + first["output_ids"] + [5, 60]
        second = await engine.generate(**body(turn))
        assert second["meta_info"]["cached_tokens"] == len(PROMPT) + 9
        whole = turn + second["output_ids"]
        np.testing.assert_array_equal(told(second), computed(moe.checkpoint, whole)[:-1])
        batch = await engine.generate(**body(PROMPT[2:]) | {"sampling_params": {"n": 3, "max_new_tokens": 6}})
        for answer in batch:
            whole = PROMPT[2:] + answer["output_ids"]
            np.testing.assert_array_equal(told(answer), computed(moe.checkpoint, whole)[:-1])


async def test_a_prompt_is_routed_without_a_token_to_sample(moe: Kind) -> None:
    assert moe.checkpoint is not None
    async with moe.serve() as engine:
        answer = await engine.generate(**body(PROMPT, 0))
        np.testing.assert_array_equal(told(answer), computed(moe.checkpoint, PROMPT)[:-1])


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_experts_are_of_the_pass_that_a_token_was_sampled_from(moe: Kind, mode: str) -> None:
    assert moe.checkpoint is not None
    async with moe.serve(tokens_per_second=200) as engine:
        async with engine.asking(**body(PROMPT, 30), rid="a") as answers:
            await engine.until(lambda s: "a" in s.running and s.running["a"].completion_tokens > 8)
            await engine.post("/pause_generation", mode=mode)
            await engine.post("/update_weights_from_disk", **moe.update)
            await engine.post("/continue_generation")
        later = await engine.generate(**body())
    (answer,) = answers
    new = Path(moe.update["model_path"])
    whole = PROMPT + answer["output_ids"]
    sampled = len(PROMPT) + answer["meta_info"]["weight_versions"][0]["end"]
    old_rows, new_rows = computed(moe.checkpoint, whole[:sampled]), computed(new, whole)
    wanted = np.concatenate([old_rows[: sampled - 1], new_rows[sampled - 1 : -1]])
    np.testing.assert_array_equal(told(answer), wanted)
    # What the sequence left in the cache is of the new weights alone.
    np.testing.assert_array_equal(told(later), computed(new, PROMPT + later["output_ids"])[:-1])
    assert later["meta_info"]["cached_tokens"] == len(PROMPT) - 1


async def test_a_sequence_without_a_pass_has_no_experts(moe: Kind) -> None:
    async with moe.serve() as engine:
        await engine.post("/pause_generation", mode="in_place")
        async with engine.asking(**body(), rid="a") as answers:
            await engine.until(lambda s: "a" in s.waiting)
            await engine.post("/abort_request", rid="a")
    assert "routed_experts" not in answers[0]["meta_info"]


async def test_a_dense_layer_has_zeros(model: NgramModel, tmp_path: Path) -> None:
    """SGLang's shape has all layers too."""
    checkpoint = save_tiny("qwen3_moe", model.tokenizer, tmp_path, 3, mlp_only_layers=[0])
    kind = Kind("qwen3_moe", lambda settings: TransformersBackend(Checkpoint(checkpoint), 100), {})
    async with kind.serve() as engine:
        answer = await engine.generate(**body())
    experts = told(answer)
    assert not experts[:, 0].any()
    logits = outputs_of(checkpoint, PROMPT + answer["output_ids"], output_router_logits=True).router_logits
    (layer,) = [each for each in logits if each is not None and each.numel()]
    np.testing.assert_array_equal(experts[:, 1], torch.topk(layer, TOP_K).indices.numpy()[:-1])


async def test_a_model_without_experts_says_so(kind: Kind) -> None:
    if kind.name != "mistral":
        pytest.skip("of the model without experts")
    async with kind.serve() as engine:
        assert (await engine.get("/server_info"))["enable_return_routed_experts"] is False
        assert "routed_experts" not in (await engine.generate(**body()))["meta_info"]
