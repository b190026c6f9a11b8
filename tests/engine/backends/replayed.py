"""Rollouts through a router before engines with a real model, and a trainer's pass that replays their experts."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson
import torch
import transformers

from deadlines import until
from engine.backends.kinds import Kind
from engine.served import JSONDict, Served
from slime_engine.backend import ExpertsArray
from slime_engine.language import FloatArray
from slime_testing import Running, started

__all__ = [
    "EXPERTS",
    "ReplayTrainer",
    "ReplayedRollouts",
    "decoded",
    "differences",
    "experts_of",
    "perturbed",
    "rolling",
]

#: Experts of a layer, as tiny.py has them.
EXPERTS = 8
LAYERS, TOP_K = 2, 2
_LAYER = re.compile(r"\.layers\.(\d+)\.")

BoolArray = npt.NDArray[np.bool_]


class ReplayTrainer:
    """The library's own model in float32, whose router layers use given experts instead of their choice.

    Only indices are given. Their weights are the model's own probabilities, normalised if its router layers do that.
    """

    def __init__(self, checkpoint: Path) -> None:
        kind: Any = transformers.AutoModelForCausalLM  # its methods have no annotations
        model = kind.from_pretrained(str(checkpoint), dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()
        self._experts = torch.empty(0)
        for name, module in self._model.named_modules():
            found = _LAYER.search(name)
            if found is not None and type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._hook(int(found[1])))

    def _hook(self, layer: int) -> Any:
        def replace(module: Any, inputs: Any, output: Any) -> Any:
            logits, scores, chosen = output
            given = self._experts[:, :, layer].reshape(chosen.shape)
            weights = logits.float().softmax(-1).gather(-1, given)
            if getattr(module, "norm_topk_prob", True):  # Mixtral's always normalise
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(scores.dtype), given

        return replace

    def logprobs(self, tokens: list[int], experts: ExpertsArray) -> FloatArray:
        """Return the logprob of each token but the first, in one pass: ``[batch, tokens - 1]``.

        ``experts``: ``[batch, tokens - 1, layers, top_k]``.
        """
        self._experts = torch.tensor(experts.astype(np.int64))
        ids = torch.tensor([tokens] * len(experts))
        with torch.inference_mode():
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
            scores = logits.double().log_softmax(-1).gather(-1, ids[:, 1:, None])
        found: FloatArray = scores[..., 0].numpy()
        return found


def decoded(text: str) -> ExpertsArray:
    """Return the rows in base64 of int32, ``[tokens, layers, top_k]``."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(-1, LAYERS, TOP_K)


def experts_of(record: JSONDict) -> ExpertsArray:
    """Return the rows of a record, which must be exact."""
    assert record["exact"], record["inexact_reason"]
    assert record["experts_exact"], record["routed_experts_reason"]
    assert record["routed_experts_shape"] == [len(record["tokens"]) - 1, LAYERS, TOP_K]
    return decoded(record["routed_experts"])


def perturbed(experts: ExpertsArray) -> ExpertsArray:
    """Return ``experts`` with another expert in place of each."""
    return (experts + 1) % EXPERTS


def differences(
    trainer: ReplayTrainer, record: JSONDict, experts: ExpertsArray, version: str | None = None
) -> FloatArray:
    """Return ``|trainer's logprob - rollout_logp|`` of the tokens with mask 1: ``[tokens]``, or ``[batch, tokens]``.

    ``version``: only of the tokens sampled under it.
    """
    batch = experts if experts.ndim == 4 else experts[None]
    off = np.abs(trainer.logprobs(record["tokens"], batch) - np.array(record["rollout_logp"][1:]))
    versions = record["generation_versions"][1:]
    wanted = [
        mask == 1 and version in (None, each)
        for mask, each in zip(record["loss_mask"][1:], versions, strict=True)
    ]
    assert any(wanted)
    found: FloatArray = off[:, np.array(wanted)]
    return found if experts.ndim == 4 else found[0]


@dataclass
class ReplayedRollouts:
    """The router, its engines, and a client that knows only text."""

    running: Running
    engines: list[Served]

    async def generate(
        self, text: str | list[str], session: str | None = None, tokens: int = 12, /, **more: Any
    ) -> Any:
        """Return the answer to ``/generate``; of a stream, its events."""
        params = {"max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling_params", {})}
        headers = {"x-session-id": session} if session is not None else {}
        body = {"text": text, "sampling_params": params, **more}
        answer = await self.running.client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [orjson.loads(line) for line in lines]

    async def record(self, text: str, session: str | None = None) -> JSONDict:
        """Return the record of ``text``, with experts."""
        body = {"text": text, "session_id": session, "return_routed_experts": True}
        answer = await self.running.client.post("/retrieve_from_text", json=body)
        assert answer.status_code == 200, answer.text
        record: JSONDict = answer.json()
        return record

    async def control(self, path: str, **body: Any) -> None:
        """Call the control plane, which calls all engines."""
        answer = await self.running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text

    def passes(self) -> list[int]:
        """Return the number of generations that each engine had."""
        return [len([*engine.host.engine.journal.entries()]) for engine in self.engines]


@asynccontextmanager
async def rolling(
    kind: Kind, *flags: str, pd: bool = False, **settings: Any
) -> AsyncIterator[ReplayedRollouts]:
    """A router with the plugins for exact tokens and experts, before two engines that share nothing.

    ``pd``: the engines are a prefill and a decode engine.
    """
    modes = ("prefill", "decode") if pd else ("null", "null")
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(kind.serve(disaggregation_mode=mode, seed=1, **settings))
            for mode in modes
        ]
        one, two = [str(engine.client.base_url) for engine in engines]
        workers = ["--worker-urls", one, two]
        if pd:
            workers = ["--pd-disaggregation", "--prefill", one, str(urlsplit(one).port), "--decode", two]
        plugins = ["--plugin", "radix_cache", "--plugin", "r3", "--hf-checkpoint", str(kind.checkpoint)]
        running = await stack.enter_async_context(started(*plugins, *flags, *workers))
        await until(lambda: running.router.pool.healthy == 2)
        yield ReplayedRollouts(running, engines)
