"""The transformers backend: the library's own results, weights that fail to load, and a loop that never waits."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from deadlines import HANG_S
from engine.backends.kinds import Kind
from engine.served import JSONDict

torch = pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from safetensors.torch import load_file, save, save_file  # noqa: E402  # after the check for torch
from transformers import AutoModelForCausalLM  # noqa: E402

from engine.hf.tiny import outputs_of  # noqa: E402

pytestmark = pytest.mark.anyio

PROMPT = [70, 101, 40, 7, 300, 44, 81, 12, 500, 9, 33, 77]


@pytest.fixture
def real(kind: Kind) -> Kind:
    if kind.checkpoint is None:
        pytest.skip("the n-gram model is not of the library")
    return kind


def body(ids: list[int] = PROMPT, tokens: int = 10, /, **more: Any) -> JSONDict:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": 1}
    return {"input_ids": ids, "return_logprob": True, "sampling_params": params, **more}


def library_logprobs(checkpoint: Path, prompt: list[int], output: list[int]) -> list[float]:
    logits = outputs_of(checkpoint, [*prompt, *output]).logits[0].double()
    places = range(len(prompt) - 1, len(prompt) + len(output) - 1)
    scores = torch.log_softmax(logits, dim=-1)
    return [float(scores[place, token]) for place, token in zip(places, output, strict=True)]


async def test_a_trainer_computes_the_same_logprobs(real: Kind) -> None:
    assert real.checkpoint is not None
    long = [(7 * place * place + 3 * place) % 1200 for place in range(700)]  # more than one pass
    async with real.serve() as engine:
        for prompt in (PROMPT, long, [*long, 5], [9]):
            answer = await engine.generate(**body(prompt, 40))
            told = [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
            truth = library_logprobs(real.checkpoint, prompt, answer["output_ids"])
            np.testing.assert_allclose(told, truth, atol=real.tolerance, rtol=0)


@pytest.mark.parametrize("damage", ["missing", "shape", "unexpected", "absent", "not a file"])
async def test_weights_that_do_not_fit_change_nothing(real: Kind, tmp_path: Path, damage: str) -> None:
    assert real.checkpoint is not None
    new = Path(real.update["model_path"])
    tensors = load_file(new / "model.safetensors")
    name = "model.layers.1.input_layernorm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["model.surprise"] = torch.zeros(3)
    place = tmp_path / "checkpoint"
    if damage != "absent":
        place.mkdir()
        (place / "config.json").write_bytes((new / "config.json").read_bytes())
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    if damage == "not a file":
        (place / "model.safetensors").write_bytes(b"no tensors")
    async with real.serve() as engine:
        before = await engine.generate(**body())
        refused = await engine.post(
            "/update_weights_from_disk", 400, model_path=str(place), weight_version="2"
        )
        assert refused.json()["success"] is False
        assert str(place) in refused.json()["message"]
        after = await engine.generate(**body())
        assert after["meta_info"]["weight_version"] == "1"
        assert after["output_ids"] == before["output_ids"]
        old, new = [answer["meta_info"]["output_token_logprobs"] for answer in (before, after)]
        np.testing.assert_allclose([one[0] for one in old], [one[0] for one in new], atol=real.tolerance)


def packed(**tensors: Any) -> JSONDict:
    text = base64.b64encode(save(tensors)).decode()
    return {"serialized_named_tensors": [text], "load_format": "safetensors"}


async def test_tensors_change_the_weights_that_they_name(real: Kind, tmp_path: Path) -> None:
    assert real.checkpoint is not None
    name = "model.embed_tokens.weight"
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(str(real.checkpoint), dtype=torch.float32)
    changed = model.state_dict()[name] * 1.5
    model.state_dict()[name].copy_(changed)
    model.save_pretrained(tmp_path)
    async with real.serve() as engine:
        await engine.generate(**body())
        update = packed(**{name: changed})
        await engine.post("/update_weights_from_tensor", **update, weight_version="2")
        answer = await engine.generate(**body())
        assert answer["meta_info"]["weight_version"] == "2"
        assert answer["meta_info"]["cached_tokens"] == 0
        told = [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
        truth = library_logprobs(tmp_path, PROMPT, answer["output_ids"])
        np.testing.assert_allclose(told, truth, atol=real.tolerance, rtol=0)


async def test_tensors_that_do_not_fit_change_nothing(real: Kind) -> None:
    name = "model.embed_tokens.weight"
    async with real.serve() as engine:
        good = torch.zeros(engine.host.engine.backend.vocab_size, 64)
        before = await engine.generate(**body())
        for wrong, said in (
            (packed(**{name: good, "lm_tail.weight": good[:1].clone()}), "lm_tail.weight"),
            (packed(**{name: good, "model.norm.weight": good[:2].clone()}), "[2, 64]"),
            ({**packed(**{name: good}), "load_format": None}, "pickles are not read"),
            ({"serialized_named_tensors": ["gAWV"], "load_format": "safetensors"}, "safetensors file"),
            ({"load_format": "safetensors"}, "must be a list"),
        ):
            refused = await engine.post("/update_weights_from_tensor", 400, **wrong, weight_version="2")
            assert said in refused.text
        other = await engine.post("/update_weights_from_distributed", 501, weight_version="2")
        assert "/update_weights_from_disk" in other.text
        after = await engine.generate(**body())
        assert after["output_ids"] == before["output_ids"]
        assert after["meta_info"]["weight_version"] == "1"


async def test_weights_without_finite_logits_crash_the_engine(real: Kind) -> None:
    async with real.serve() as engine:
        bad = packed(**{"model.norm.weight": torch.full((64,), float("nan"))})
        await engine.post("/update_weights_from_tensor", **bad, weight_version="2")
        refused = await engine.client.post("/generate", json=body())
        assert refused.status_code == 500
        assert "not finite" in refused.text
        assert (await engine.client.get("/health")).status_code == 503


async def test_health_is_answered_while_the_model_computes(
    real: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with real.serve() as engine:
        backend: Any = engine.host.engine.backend
        forward, begun, may_end = backend._network.forward, threading.Event(), threading.Event()

        def slow(parts: Any) -> Any:
            begun.set()
            assert may_end.wait(HANG_S)
            return forward(parts)

        monkeypatch.setattr(backend._network, "forward", slow)
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await engine.client.post("/generate", json=body(rid="a"), timeout=HANG_S))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            with anyio.fail_after(HANG_S):
                while not begun.is_set():  # noqa: ASYNC110  # set by a thread
                    await anyio.sleep(0.002)
            assert (await engine.client.get("/health")).status_code == 200
            await engine.post("/abort_request", rid="a")
            with anyio.fail_after(HANG_S):
                while not answers:  # noqa: ASYNC110
                    await anyio.sleep(0.002)
            assert not may_end.is_set(), "an abort does not wait for the model"
            may_end.set()
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert answers[0].json()["output_ids"] == []
        answer = await engine.generate(**body())
        assert len(answer["output_ids"]) == 10


async def test_the_context_is_as_long_as_the_model_allows(real: Kind) -> None:
    async with real.serve() as engine:
        assert (await engine.get("/v1/models"))["data"][0]["max_model_len"] == 4096
        refused = await engine.generate(400, **body([5] * 4096))
        assert "4096" in refused["error"]["message"]
    async with real.serve(context_length=100) as engine:
        assert (await engine.get("/server_info"))["context_length"] == 100


async def test_old_prefixes_are_dropped(real: Kind) -> None:
    async def cached(ids: list[int]) -> int:
        answer = await engine.generate(**body(ids, 1))
        return int(answer["meta_info"]["cached_tokens"])

    prompts = [[place, *PROMPT] for place in range(3)]
    async with real.serve() as engine:
        engine.host.engine.backend._prefixes[0]._limit = 2 * len(prompts[0])  # type: ignore[attr-defined]
        assert [await cached(ids) for ids in prompts] == [0, 0, 0]
        assert [await cached(ids) for ids in (prompts[2], prompts[0])] == [len(PROMPT), 0]
