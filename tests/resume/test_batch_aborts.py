"""Aborts in answers of several sequences: each of them is resumed alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aborting_engine import AbortingEngine
from deadlines import until
from radix_cache.scripted import bits
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPTS = ["the sea", "a hill ☔", "one"]
LENGTH = 6


def aborting(tokenizer: EngineTokenizer, *numbers: int) -> AbortingEngine:
    """Abort the sequences of these numbers after two tokens; each sequence has other tokens than the rest."""
    cuts = [2 if number in numbers else None for number in range(10)]
    return AbortingEngine(
        tokenizer, lambda number: [300 + (7 * number + place) % 200 for place in range(9)], cuts
    )


def hold_attempts(engine: AbortingEngine) -> anyio.Event:
    """Let all requests but the first wait."""
    hold = anyio.Event()

    def edit(_output: dict[str, Any], _is_last: bool) -> None:
        engine.delay = hold if len(engine.asked) > 1 else None

    engine.edit = edit
    return hold


async def ask(running: Running, **body: Any) -> list[dict[str, Any]]:
    body.setdefault("sampling_params", {"max_new_tokens": LENGTH})
    answer = await running.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    answers: list[dict[str, Any]] = answer.json()
    return answers


async def retrieved(running: Running, text: str) -> dict[str, Any]:
    record: dict[str, Any] = (await running.client.post("/retrieve_from_text", json={"text": text})).json()
    assert record["exact"], record
    return record


def flags(checkpoint: str, url: str, *more: str) -> tuple[str, ...]:
    cache = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint)
    return (*cache, "--worker-urls", url, "--abort-retry-wait-s", "0.01", *more)


@pytest.mark.parametrize("resume", [False, True])
async def test_each_aborted_sequence_of_a_batch_is_resumed(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, resume: bool
) -> None:
    engine = aborting(tokenizer, 0, 2, 3)  # of the batch the first and the last, and one of these once more
    more = ("--resume-aborted",) if resume else ()
    async with serving(engine.app) as url, start(*flags(checkpoint, url, *more)) as running:
        parameters = [{"max_new_tokens": LENGTH + place} for place in range(3)]
        answers = await ask(running, text=PROMPTS, sampling_params=parameters, rid="b")
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length"] * 3
        assert [len(answer["output_ids"]) for answer in answers] == [LENGTH, LENGTH + 1, LENGTH + 2]
        assert sorted({body["rid"] for body in engine.asked}) == ["b", "b_0", "b_2"]
        assert len(engine.asked) == 4  # one of the two was aborted again
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            record = await retrieved(running, prompt + answer["text"])
            ids = tokenizer.encode(prompt)
            assert record["tokens"] == ids + answer["output_ids"]
            logprobs = [triple[0] for triple in answer["meta_info"]["output_token_logprobs"]]
            assert bits(record["rollout_logp"][len(ids) :]) == bits(logprobs)
            sampled = {
                (i, p) for sampled, probs in engine.sampled for i, p in zip(sampled, probs, strict=True)
            }
            assert set(zip(answer["output_ids"], logprobs, strict=True)) <= sampled
        assert len(engine.sampled) == 6
        assert not any(worker.in_flight for worker in running.router.pool)


async def test_each_aborted_sample_of_a_group_is_resumed(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    engine = aborting(tokenizer, 1, 2)
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        parameters = {"max_new_tokens": LENGTH, "n": 4}
        answers = await ask(running, text=PROMPTS[0], sampling_params=parameters)
        assert [len(answer["output_ids"]) for answer in answers] == [LENGTH] * 4
        assert [body["sampling_params"]["n"] for body in engine.asked] == [4, 1, 1]
        consumed = tokenizer.encode(PROMPTS[0])
        assert engine.consumed == [consumed] * 6
        texts = {answer["text"] for answer in answers}
        assert len(texts) == 4
        for answer in answers:
            record = await retrieved(running, PROMPTS[0] + answer["text"])
            assert record["tokens"] == consumed + answer["output_ids"]
        assert (await running.client.get("/cache_stats")).json()["aborts"] == {"tried_again": 2}


@pytest.mark.parametrize("resume", [False, True])
async def test_nonsense_in_one_sequence_of_a_batch_stops_no_other(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str, resume: bool
) -> None:
    engine = aborting(tokenizer, 0, 1)

    def edit(output: dict[str, Any], _is_last: bool) -> None:
        if len(engine.consumed) == 1:
            output["output_ids"] = "nonsense"

    engine.edit = edit
    more = ("--resume-aborted",) if resume else ()
    async with serving(engine.app) as url, start(*flags(checkpoint, url, *more)) as running:
        answers = await ask(running, text=PROMPTS, session_id="s")
        assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in answers] == [
            2,
            LENGTH,
            LENGTH,
        ]
        for prompt, answer in zip(PROMPTS[1:], answers[1:], strict=True):
            record = await retrieved(running, prompt + answer["text"])
            assert record["tokens"] == tokenizer.encode(prompt) + answer["output_ids"]
        body = {"text": PROMPTS[0] + answers[0]["text"]}
        lost = (await running.client.post("/retrieve_from_text", json=body)).json()
        assert (lost["exact"], lost["inexact_reason"]) == (False, "evicted")
        assert not (await running.client.get("/trajectories/s")).json()["complete"]


async def test_an_abort_that_was_asked_for_is_not_undone(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    """Of a batch one is aborted by its own name, the other one by the engine."""
    engine = aborting(tokenizer, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    hold = hold_attempts(engine)
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        answers: list[dict[str, Any]] = []

        async def roll() -> None:
            answers.extend(await ask(running, text=PROMPTS[:2], rid="b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(roll)
            await until(lambda: len(engine.asked) == 3)  # both are being tried again
            await running.client.post("/abort_request", json={"rid": "b_0"})
            hold.set()
        assert answers[0]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        attempts = Counter(body["rid"] for body in engine.asked)
        assert attempts["b_0"] == 1
        assert attempts["b_1"] > 1


async def test_a_client_that_goes_leaves_nothing_behind(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    engine = aborting(tokenizer, 0, 1, 2)
    hold = hold_attempts(engine)
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        with anyio.CancelScope() as patience:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: ask(running, text=PROMPTS))
                await until(lambda: len(engine.asked) == 4)
                patience.cancel()
        hold.set()
        router = running.router
        await until(lambda: not router.proxy.busy_connections)
        assert not any(worker.in_flight for worker in router.pool)
