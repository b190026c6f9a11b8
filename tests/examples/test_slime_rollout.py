"""examples/slime_rollout: slime's calls of a custom generate function, with a stand-in of its sample."""

from __future__ import annotations

import argparse
import enum
import importlib
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from deadlines import HANG_S
from routers import Start
from slime_radix_cache.client import NotExact
from slime_testing import Running
from wheels import ROOT

pytestmark = pytest.mark.anyio

EXAMPLE = ROOT / "examples" / "slime_rollout"
PROMPT = "<|im_start|>user\nHow much is 37 times 43?<|im_end|>\n<|im_start|>assistant\n"
#: As slime sends them.
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 512,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@dataclass
class SlimeSample:
    """The fields of slime's sample that a generate function sees."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    prompt: str = PROMPT
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    session_id: str = field(default_factory=lambda: str(uuid.uuid4()))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)
    module = importlib.import_module("calculator_agent")
    module.router_at.cache_clear()
    return module


@dataclass
class SlimeTrainer:
    """Calls the example as slime does."""

    example: ModuleType
    running: Running

    async def generate(self, sample: SlimeSample, **sampling: Any) -> None:
        where = urlsplit(self.running.url)
        args = argparse.Namespace(sglang_router_ip=where.hostname, sglang_router_port=where.port)
        assert await self.example.generate(args, sample, {**SAMPLING, **sampling}) is sample

    async def entries(self) -> list[dict[str, Any]]:
        (worker,) = (await self.running.client.get("/workers")).json()["workers"]
        journal = await self.running.client.get(f"{worker['url']}/journal")
        entries: list[dict[str, Any]] = journal.json()["entries"]
        return entries


@asynccontextmanager
async def training(
    example: ModuleType, start: Start, script: Path, *flags: str
) -> AsyncIterator[SlimeTrainer]:
    engine = ("--plugin", "engine", "--engine-script", str(script), *flags)
    async with start(*engine, "--plugin", "radix_cache", "--abort-retries", "0") as running:
        trainer = SlimeTrainer(example, running)
        try:
            yield trainer
        finally:
            where = urlsplit(running.url)
            await example.router_at(f"http://{where.hostname}:{where.port}").aclose()


def check(sample: SlimeSample, entries: Sequence[dict[str, Any]]) -> None:
    """The tokens are those that the engine consumed and sampled, turn by turn. Raises AssertionError."""
    mask, logprobs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
    for entry in entries:
        start, sampled = len(entry["input_ids"]), entry["output_ids"]
        if sample.tokens[: start + len(sampled)] == entry["input_ids"] + sampled:
            mask[start : start + len(sampled)] = [1] * len(sampled)
            logprobs[start : start + len(sampled)] = entry["output_logprobs"]
    first = len(sample.tokens) - sample.response_length
    assert any(mask)
    assert not any(mask[:first])
    assert sample.loss_mask == mask[first:]
    assert sample.rollout_log_probs == logprobs[first:]


async def test_samples_have_the_tokens_of_all_turns(example: ModuleType, start: Start) -> None:
    samples = [SlimeSample() for _ in range(6)]
    async with training(example, start, EXAMPLE / "answers.jsonl") as trainer:
        async with anyio.create_task_group() as tasks:
            for sample in samples:
                tasks.start_soon(trainer.generate, sample)
        entries = await trainer.entries()
    assert len(entries) == 12
    for sample in samples:
        assert sample.status is SlimeSample.Status.COMPLETED
        assert sample.response.endswith("37 times 43 is 1591.<|im_end|>")
        assert sample.weight_versions == ["default"]
        check(sample, entries)


async def test_an_aborted_sample_goes_on_where_it_was_cut_off(
    example: ModuleType, start: Start, tmp_path: Path
) -> None:
    """slime aborts at each engine, and gives the sample to the function again in its next rollout."""
    endless = {"answer": "It is 1591. " * 2000}
    first = (EXAMPLE / "answers.jsonl").read_text().splitlines()[0]
    (tmp_path / "endless.jsonl").write_text(f"{first}\n{json.dumps(endless)}\n")
    sample = SlimeSample()
    pace = ("--engine-tokens-per-second", "400")
    async with training(example, start, tmp_path / "endless.jsonl", *pace) as trainer:
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(trainer.generate, sample, max_new_tokens=20_000))
                while not [entry["output_ids"] for entry in await trainer.entries()][1:]:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                (worker,) = (await trainer.running.client.get("/workers")).json()["workers"]
                aborted = await trainer.running.client.post(
                    f"{worker['url']}/abort_request", json={"abort_all": True}
                )
                assert aborted.status_code == 200
        assert sample.status.value == "aborted"
        check(sample, await trainer.entries())
        sampled = sum(sample.loss_mask or ())
        await trainer.generate(sample, max_new_tokens=sampled + 20)
        entries = await trainer.entries()
    assert sample.status.value == "truncated"
    assert sum(sample.loss_mask or ()) == sampled + 20
    check(sample, entries)


async def test_a_wrong_call_is_told_to_the_model(example: ModuleType, start: Start, tmp_path: Path) -> None:
    entries = (
        {"when": {"turn": 1}, "answer": "<tool_call>{37 * 43}</tool_call>"},
        {"when": {"tool": "wrong call"}, "answer": "I cannot calculate."},
    )
    (tmp_path / "wrong.jsonl").write_text("\n".join(map(json.dumps, entries)))
    sample = SlimeSample()
    async with training(example, start, tmp_path / "wrong.jsonl") as trainer:
        await trainer.generate(sample)
        check(sample, await trainer.entries())
    assert sample.response.endswith("I cannot calculate.<|im_end|>")


async def test_turns_and_tokens_are_limited(example: ModuleType, start: Start, tmp_path: Path) -> None:
    call = {"answer": {"tool_calls": [{"name": "multiply", "arguments": {"a": 2, "b": 3}}]}}
    (tmp_path / "loop.jsonl").write_text(json.dumps(call))
    turns, short = SlimeSample(), SlimeSample()
    async with training(example, start, tmp_path / "loop.jsonl") as trainer:
        await trainer.generate(turns)
        await trainer.generate(short, max_new_tokens=5)
        entries = await trainer.entries()
    assert len(entries) == example.MAX_TURNS + 1
    assert (turns.status, short.status) == (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED)
    for sample in (turns, short):
        check(sample, entries)


async def test_a_sample_that_is_not_exact_is_no_sample(example: ModuleType, start: Start) -> None:
    sample = SlimeSample(response="Nobody has sampled this.")
    async with training(example, start, EXAMPLE / "answers.jsonl") as trainer:
        with pytest.raises(NotExact):
            await trainer.example.router_at(trainer.running.url).fill(sample, session=sample.session_id)
