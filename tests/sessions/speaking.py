"""Agents that talk in a session, and what the engine knows of their samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import safetensors.numpy

from openai_.chat.chatting import Chat
from slime_engine.journal import JournalEntry

__all__ = ["Sample", "Samples", "said_by", "samples_of", "speak", "talk"]


@dataclass(frozen=True)
class Sample:
    """One sample, as a client of miles' decodes it."""

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    about: dict[str, Any]

    @property
    def start(self) -> int:
        return len(self.tokens) - len(self.loss_mask)


@dataclass(frozen=True)
class Samples:
    """A reply of ``POST /sessions/{id}/samples``."""

    samples: list[Sample]
    metadata: dict[str, Any]
    empty_reason: str | None


async def speak(chat: Chat, base: str, messages: list[dict[str, Any]], **body: Any) -> list[dict[str, Any]]:
    """The conversation after one more answer below ``base``."""
    answer = await chat.post(f"{base}/v1/chat/completions", messages=messages, **body)
    return [*messages, answer["choices"][0]["message"]]


async def talk(chat: Chat, base: str, *questions: str) -> list[dict[str, Any]]:
    """A conversation of some turns."""
    messages: list[dict[str, Any]] = []
    for question in questions:
        messages = await speak(chat, base, [*messages, {"role": "user", "content": question}])
    return messages


async def samples_of(client: httpx.AsyncClient, session: str, **body: Any) -> Samples:
    """Return the samples that a trainer gets."""
    answer = await client.post(f"/sessions/{session}/samples", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    tensors = safetensors.numpy.load(answer.content)
    meta = json.loads(tensors.pop("_samples_meta").tobytes())
    found = []
    for index, about in enumerate(meta["samples"]):
        tokens = tensors.pop(f"tokens.{index}")
        mask = tensors.pop(f"loss_mask.{index}")
        logprobs = tensors.pop(f"rollout_log_probs.{index}")
        assert [str(each.dtype) for each in (tokens, mask, logprobs)] == ["int64", "uint8", "float64"]
        assert about["response_length"] == len(mask) == len(logprobs)
        assert about["nulls"] == ["rollout_routed_experts", "rollout_indexer_topk"]
        found.append(Sample(tokens.tolist(), mask.tolist(), logprobs.tolist(), about))
    assert not tensors, "miles refuses tensors that belong to no sample"
    return Samples(found, meta["session_metadata"], meta["empty_reason"])


def said_by(sample: Sample, *entries: JournalEntry) -> None:
    """Assert that ``sample`` trains on what the engine sampled in ``entries``, up to its end, and on nothing else."""
    mask = [0] * len(sample.tokens)
    logprobs = [0.0] * len(sample.tokens)
    for entry in entries:
        start = len(entry.input_ids)
        stop = min(start + len(entry.output_ids), len(sample.tokens))
        assert sample.tokens[:start] == list(entry.input_ids)
        assert sample.tokens[start:stop] == list(entry.output_ids)[: stop - start]
        mask[start:stop] = [1] * (stop - start)
        logprobs[start:stop] = entry.output_logprobs[: stop - start]
    assert sample.loss_mask == mask[sample.start :]
    assert not any(mask[: sample.start])
    trained = [
        one if is_sampled else 0.0 for one, is_sampled in zip(sample.logprobs, sample.loss_mask, strict=True)
    ]
    assert trained == logprobs[sample.start :]
