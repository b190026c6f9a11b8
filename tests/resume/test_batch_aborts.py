"""Aborts in answers of several sequences: each of them is resumed alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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


class Engine:
    """Samples LENGTH tokens, its own for each attempt, and aborts sequences of ``aborted`` numbers after two.

    The one of number ``nonsense`` has no list of ids.
    ``asked`` are the bodies it got, ``journal`` has ``(consumed, sampled, logprobs)`` of every sequence.
    """

    def __init__(self, tokenizer: EngineTokenizer, *aborted: int) -> None:
        self.tokenizer = tokenizer
        self.aborted = list(aborted)
        self.asked: list[dict[str, Any]] = []
        self.journal: list[tuple[list[int], list[int], list[float]]] = []
        self.version = 0
        self.nonsense: int | None = None
        self.hold: anyio.Event | None = None
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        self.version += 1
        prompts = body["input_ids"]
        alone = isinstance(prompts[0], int)
        parameters = body["sampling_params"]
        copies = (parameters if isinstance(parameters, dict) else parameters[0]).get("n", 1)
        if len(self.asked) > 1 and self.hold is not None:
            await self.hold.wait()
        outputs = [
            self.output(ids, parameters if isinstance(parameters, dict) else parameters[place])
            for place, ids in enumerate([prompts] if alone else prompts)
            for _ in range(copies)
        ]
        return JSONResponse(outputs[0] if alone and copies == 1 else outputs)

    def output(self, prompt: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        number = len(self.journal)
        cut = number in self.aborted
        count = 2 if cut else parameters["max_new_tokens"]
        ids = [300 + (7 * number + place) % 200 for place in range(count)]
        logprobs = [-(number + place + 1) / 7 for place in range(count)]
        self.journal.append((prompt, ids, logprobs))
        reason: dict[str, Any] = {"type": "abort"} if cut else {"type": "length", "length": count}
        return {
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "output_ids": "nonsense" if number == self.nonsense else ids,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "weight_version": str(self.version),
                "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
            },
        }


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
    engine = Engine(tokenizer, 0, 2, 3)  # of the batch the first and the last, and one of these once more
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
                (i, p) for _, sampled, probs in engine.journal for i, p in zip(sampled, probs, strict=True)
            }
            assert set(zip(answer["output_ids"], logprobs, strict=True)) <= sampled
        assert len(engine.journal) == 6
        assert not any(worker.in_flight for worker in running.router.pool)


async def test_each_aborted_sample_of_a_group_is_resumed(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    engine = Engine(tokenizer, 1, 2)
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        parameters = {"max_new_tokens": LENGTH, "n": 4}
        answers = await ask(running, text=PROMPTS[0], sampling_params=parameters)
        assert [len(answer["output_ids"]) for answer in answers] == [LENGTH] * 4
        assert [body["sampling_params"]["n"] for body in engine.asked] == [4, 1, 1]
        consumed = tokenizer.encode(PROMPTS[0])
        assert [entry[0] for entry in engine.journal] == [consumed] * 6
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
    engine = Engine(tokenizer, 0, 1)
    engine.nonsense = 0
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
    engine = Engine(tokenizer, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    engine.hold = anyio.Event()
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        answers: list[dict[str, Any]] = []

        async def roll() -> None:
            answers.extend(await ask(running, text=PROMPTS[:2], rid="b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(roll)
            await until(lambda: len(engine.asked) == 3)  # both are being tried again
            await running.client.post("/abort_request", json={"rid": "b_0"})
            engine.hold.set()
        assert answers[0]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        attempts = Counter(body["rid"] for body in engine.asked)
        assert attempts["b_0"] == 1
        assert attempts["b_1"] > 1


async def test_a_client_that_goes_leaves_nothing_behind(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    engine = Engine(tokenizer, 0, 1, 2)
    engine.hold = anyio.Event()
    async with serving(engine.app) as url, start(*flags(checkpoint, url)) as running:
        with anyio.CancelScope() as patience:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: ask(running, text=PROMPTS))
                await until(lambda: len(engine.asked) == 4)
                patience.cancel()
        engine.hold.set()
        router = running.router
        await until(lambda: not router.proxy.busy_connections)
        assert not any(worker.in_flight for worker in router.pool)
