"""Every shape of ``/generate``, with an embedded engine and its journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits
from router_core.cli import build, is_compiled
from router_core.errors import StartupError

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

PROMPTS = ["<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "the harbour ☔"]
PARAMETERS = {"max_new_tokens": 12, "temperature": 1.2}


@dataclass
class Shapes:
    client: httpx.AsyncClient

    async def generate(self, **body: Any) -> Any:
        """The answer, or for a stream the last event of each sequence in order."""
        body = {"sampling_params": PARAMETERS, **body}
        reply = await self.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            return reply.json()
        last: dict[int, Any] = {}
        for line in reply.text.splitlines():
            if line.startswith("data: {"):
                event = orjson.loads(line[6:])
                last[event.get("index", 0)] = event
        return [last[index] for index in sorted(last)]

    async def text_of(self, ids: list[int]) -> str:
        body = {"tokens": ids, "skip_special_tokens": False}
        text: str = (await self.client.post("/detokenize", json=body)).json()["text"]
        return text

    async def is_exact(self, text: str) -> dict[str, Any]:
        """Retrieve ``text``, check that it equals an entry of the journal, and return the answer."""
        answer: dict[str, Any] = (await self.client.post("/retrieve_from_text", json={"text": text})).json()
        assert answer["exact"], answer["inexact_reason"]
        (url,) = (await self.client.get("/list_workers")).json()["urls"]
        entries = (await self.client.get(f"{url}/journal")).json()["entries"]
        found = [
            entry
            for entry in entries
            if answer["tokens"] == entry["input_ids"] + entry["output_ids"]
            and bits(answer["rollout_logp"])[-8 * len(entry["output_ids"]) :]
            == bits(entry["output_logprobs"])
        ]
        assert found
        return answer


@pytest.fixture
async def shapes(start: Start) -> AsyncIterator[Shapes]:
    async with shaped(start) as shapes:
        yield shapes


@asynccontextmanager
async def shaped(start: Start, *flags: str) -> AsyncIterator[Shapes]:
    async with start(
        "--plugin", "engine", "--engine-seed", "7", *flags, "--plugin", "radix_cache"
    ) as running:
        yield Shapes(running.client)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_sample_of_a_batch_is_recorded(shapes: Shapes, stream: bool) -> None:
    parameters = PARAMETERS | {"n": 3}
    answers = await shapes.generate(text=PROMPTS, stream=stream, sampling_params=parameters)
    assert len(answers) == 6
    for number, answer in enumerate(answers):
        await shapes.is_exact(PROMPTS[number // 3] + answer["text"])


async def test_each_sample_of_an_incremental_batch_is_recorded(start: Start) -> None:
    async with shaped(start, "--engine-incremental-streaming-output") as shapes:
        await shapes.generate(text=PROMPTS, stream=True)
        (url,) = (await shapes.client.get("/list_workers")).json()["urls"]
        entries = (await shapes.client.get(f"{url}/journal")).json()["entries"]
        for prompt, entry in zip(PROMPTS, entries, strict=True):
            await shapes.is_exact(prompt + entry["text"])


async def test_given_ids_are_recorded_unchanged_and_old_responses_keep_mask(shapes: Shapes) -> None:
    prompt = [300, 301, 302]
    first = await shapes.generate(input_ids=prompt)
    assert first["meta_info"]["output_token_logprobs"]
    follow_up = prompt + first["output_ids"] + [303, 304]
    second = await shapes.generate(input_ids=follow_up)
    decoded = await shapes.text_of(follow_up)
    answer = await shapes.is_exact(decoded + second["text"])
    sampled = len(first["output_ids"])
    assert answer["tokens"][: len(follow_up)] == follow_up
    assert answer["loss_mask"] == [0] * 3 + [1] * sampled + [0] * 2 + [1] * len(second["output_ids"])
    logprobs = [value for value, *_ in first["meta_info"]["output_token_logprobs"]]
    assert bits(answer["rollout_logp"][3 : 3 + sampled]) == bits(logprobs)


async def test_given_ids_may_keep_a_part_of_a_response(shapes: Shapes) -> None:
    first = await shapes.generate(input_ids=[300, 301])
    follow_up = [300, 301, *first["output_ids"][:3], 303]
    second = await shapes.generate(input_ids=follow_up)
    decoded = await shapes.text_of(follow_up)
    answer = await shapes.is_exact(decoded + second["text"])
    assert answer["loss_mask"][:6] == [0, 0, 1, 1, 1, 0]


async def test_a_batch_of_given_ids_is_recorded(shapes: Shapes) -> None:
    answers = await shapes.generate(input_ids=[[300, 301], [302]], return_logprob=True)
    for ids, answer in zip([[300, 301], [302]], answers, strict=True):
        decoded = await shapes.text_of(ids)
        await shapes.is_exact(decoded + answer["text"])


WAYS_TO_STOP: tuple[dict[str, Any], ...] = (
    {"stop": ["e", " t"]},
    {"stop": ["e", " t"], "no_stop_trim": True},
    {"stop_token_ids": list(range(200, 400))},
    {"stop_token_ids": list(range(200, 400)), "no_stop_trim": True},
    {"skip_special_tokens": False},
    {"skip_special_tokens": False, "no_stop_trim": True},
    {"ignore_eos": True, "max_new_tokens": 60},
    {"max_new_tokens": 1},
    {"temperature": 0},
)


async def test_every_way_to_stop_is_exact_and_can_be_continued(shapes: Shapes) -> None:
    for number, parameters in enumerate(WAYS_TO_STOP):
        for prompt in PROMPTS:
            text = f"{number} {prompt}"
            for turn in range(3):
                answer = await shapes.generate(text=text, sampling_params={**PARAMETERS, **parameters})
                text += answer["text"]
                await shapes.is_exact(text)
                text += ("<|im_end|>\n", " and", "")[turn]
    stats = (await shapes.client.get("/cache_stats")).json()
    assert stats["unrecorded"] == {}
    assert stats["hits"] >= 27  # an empty answer leaves nothing to go on from


async def test_images_pass_untouched_and_nothing_false_is_recorded(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.script.append([5, 6])
    body = {"text": "what is this?", "image_data": ["data:image/png;base64,AAAA"]}
    await client.running.client.post("/generate", json=body)
    assert engine.asked == [body]
    stats = await client.stats()
    assert (stats["entries"], stats["untouched"]) == (0, {"image_data": 1})
    assert not (await client.retrieve("what is this?" + engine.tokenizer.decode([5, 6])))["exact"]


async def test_tokens_of_a_stream_are_known_while_it_runs(client: Client, engine: ScriptedEngine) -> None:
    ids = engine.tokenizer.encode("the harbour wakes before the town does")
    engine.script.append(ids)
    engine.hold_after = 3
    engine.hold = anyio.Event()
    body = {"text": PROMPTS[0], "stream": True, "session_id": "one"}
    async with client.running.client.stream("POST", "/generate", json=body) as stream:
        lines = stream.aiter_lines()
        for _ in range(5):
            await anext(lines)  # three events, and the empty lines between them
        told = PROMPTS[0] + engine.tokenizer.decode(ids[:3])
        assert not (await client.retrieve("something else"))["exact"]
        assert not (await client.retrieve(told, session_id="another"))["exact"]
        assert (await client.stats())["entries"] == 0
        assert (await client.retrieve(told))["exact"]
        assert (await client.stats())["entries"] == 2
        engine.hold.set()
        async for _ in lines:
            pass
    assert (await client.retrieve(told))["exact"]
    answer = await client.retrieve(PROMPTS[0] + engine.tokenizer.decode(ids))
    assert answer["exact"]
    assert answer["tokens"] == client.last()[0]
    assert (await client.stats())["entries"] == 2  # the part was taken back


@pytest.mark.skipif(is_compiled(), reason="a compiled method cannot be replaced")
async def test_a_failure_of_the_cache_changes_no_answer_and_is_told_once(
    client: Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("slime_radix_cache.index.trajectories.Trajectories.record", fail)
    answers = [await client.generate(PROMPTS[0], [5, 6]) for _ in range(2)]
    assert [answer["output_ids"] for answer in answers] == [[5, 6], [5, 6]]
    assert (await client.stats())["unrecorded"] == {"answer_not_understood": 2}
    assert len([record for record in caplog.records if "answer_not_understood" in record.message]) == 1
    monkeypatch.setattr("slime_radix_cache.capture.turns.Turns.begin", fail)
    await client.generate(PROMPTS[0], [5, 6])
    assert engine.asked[-1] == {"text": PROMPTS[0]}
    assert not (await client.retrieve(PROMPTS[0] + answers[0]["text"]))["exact"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--hf-checkpoint", "/no/such/model"],
            "--hf-checkpoint /no/such/model: no such directory; wanted a ",
        ),
        ([], "radix_cache needs --hf-checkpoint PATH, or --plugin engine"),
        (
            ["--plugin", "engine", "--radix-tree-max-size", "-1"],
            "--radix-tree-max-size: wanted 0 or more, got -1",
        ),
    ],
)
def test_a_start_that_cannot_work_ends_with_one_line(flags: list[str], told: str) -> None:
    with pytest.raises(StartupError) as caught:
        build(["--plugin", "radix_cache", *flags])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
