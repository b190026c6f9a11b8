"""Two engines behind a router, and what their journals say of the samples that a framework has.

The engines say what a script tells them, in tokens that no tokenizer would choose: tokens that were made of text
again are other ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from deadlines import HANG_S
from openai_.chat_models.families import QWEN3, Family, Words
from openai_.chat_models.steered import Steered, by_text, speaking
from router_core.router import Router
from routers import Start
from slime_engine.journal import JournalEntry
from slime_testing import Running

__all__ = ["ENDLESS", "Fleet", "Sample", "serving_fleet"]

#: More than is said before it is aborted.
ENDLESS = Words("It rains everywhere, stay at home “日本語” ☔. " * 40)

#: So many tokens are hardly spelt as a tokenizer would.
_SOME = 30
_ANSWER_BEGINS = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Sample:
    """Tokens of a conversation: what was sampled has ``mask`` 1 and its ``logprobs``, the rest 0 and 0.0.

    An array of logprobs is compared in its own precision.
    """

    tokens: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] | npt.NDArray[np.float32]
    versions: Sequence[str | int] | None = None


@dataclass(frozen=True)
class Fleet:
    """A router, two engines behind it, and the ``family`` of their model."""

    running: Running
    engines: tuple[Steered, ...]
    family: Family

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def router(self) -> Router:
        return self.running.router

    @property
    def checkpoint(self) -> str:
        """A directory for ``AutoTokenizer.from_pretrained``."""
        return self.engines[0].checkpoint

    def entries(self) -> list[JournalEntry]:
        """All journals."""
        return [entry for engine in self.engines for entry in engine.journal()]

    async def update_weights(self, version: str) -> None:
        """New weights on all engines, without an abort."""
        await self._control("/pause_generation", mode="in_place")
        await self._control("/update_weights_from_disk", model_path="/weights", weight_version=version)
        await self._control("/continue_generation")

    async def abort(self) -> None:
        """End all that is generated."""
        await self._control("/abort_request", abort_all=True)

    async def _control(self, path: str, **body: Any) -> None:
        answer = await self.running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text

    async def generating(self, requests: int) -> None:
        """Return when that many requests have some tokens. Raises TimeoutError."""
        with anyio.fail_after(HANG_S):
            while sum(len(entry.output_ids) >= _SOME for entry in self.entries()) < requests:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    async def trajectories(self, session: str) -> list[dict[str, Any]]:
        """The records of a session, each checked. Raises AssertionError."""
        document = (await self.running.client.get(f"/trajectories/{session}")).raise_for_status().json()
        assert document["complete"]
        records: list[dict[str, Any]] = document["trajectories"]
        for record in records:
            self._check_record(record)
        return records

    def _check_record(self, record: dict[str, Any]) -> None:
        assert (record["exact"], record["inexact_reason"]) == (True, None)
        keys = ("tokens", "loss_mask", "rollout_logp", "generation_versions")
        self.check(Sample(*(record[key] for key in keys)))

    async def retrieve(self, text: str) -> dict[str, Any]:
        """The router's record of ``text``, checked. Raises AssertionError."""
        answer = await self.running.client.post("/retrieve_from_text", json={"text": text})
        record: dict[str, Any] = answer.raise_for_status().json()
        self._check_record(record)
        return record

    def check(self, sample: Sample) -> None:
        """Sampled is what an engine sampled behind the very tokens before it. Raises AssertionError."""
        tokens = list(sample.tokens)
        mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
        versions: list[str | int] = [-1] * len(tokens)
        for entry in self.entries():
            start = len(entry.input_ids)
            if tokens[:start] != list(entry.input_ids):
                continue
            kept = len(list(takewhile(bool, map(eq, tokens[start:], entry.output_ids))))
            mask[start : start + kept] = [1] * kept
            logprobs[start : start + kept] = entry.output_logprobs[:kept]
            versions[start : start + kept] = entry.as_json()["output_versions"][:kept]
        assert any(mask)
        assert tokens != self.family.tokenizer.encode(self.family.tokenizer.decode(tokens)), "proves nothing"
        assert list(sample.mask) == mask
        told = np.asarray(sample.logprobs)
        assert told.tolist() == np.array(logprobs, told.dtype).tolist()
        if sample.versions is not None:
            assert list(sample.versions) == versions


@asynccontextmanager
async def serving_fleet(
    start: Start, *says: Words, family: Family = QWEN3, flags: Sequence[str] = (), **settings: Any
) -> AsyncIterator[Fleet]:
    """The engines answer each conversation with ``says``, turn by turn; ``settings`` are theirs.

    The router has radix_cache and openai; ``flags`` are more of its own.
    """

    def script(text: str) -> Sequence[str]:
        return [family.says(says[text.count(_ANSWER_BEGINS) - 1], text)]

    async with AsyncExitStack() as stack:
        steps = by_text(family.tokenizer, script)
        engines = [
            await stack.enter_async_context(
                speaking(family, steps, **{"seed": seed, "weight_version": "1", **settings})
            )
            for seed in (7, 8)
        ]
        running = await stack.enter_async_context(
            start(
                *("--plugin", "radix_cache", "--hf-checkpoint", engines[0].checkpoint),
                *("--plugin", "openai", *flags),
                *("--worker-urls", *(engine.url for engine in engines)),
            )
        )
        with anyio.fail_after(HANG_S):
            while not all(worker.state == "ready" for worker in running.router.pool):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        yield Fleet(running, tuple(engines), family)
