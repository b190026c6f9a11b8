"""Generations by a prefill and a decode engine, held against the journals of both."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from engine.served import served
from pd.checked import SAMPLING, check
from pd.halves import PROMPT, disaggregated, rows
from plugged import until
from routers import Start
from slime_engine.model import NgramModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which ends with ``[DONE]``."""
    async with client.stream("POST", "/generate", json={"text": PROMPT, **body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_whole_answer_is_the_decode_engines(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model) as pairs:
        for _ in range(3):
            output = await pairs.generate(sampling_params=SAMPLING)
            assert len(output["output_ids"]) == 12
            check(pairs, output)


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_is_the_decode_engines_and_comes_as_it_is_sampled(
    start: Start, model: NgramModel, incremental: bool
) -> None:
    how: dict[str, Any] = {"incremental_streaming_output": incremental, "tokens_per_second": 50}
    async with disaggregated(start, model, **how) as pairs:
        events = await streamed(pairs.running.client, sampling_params=SAMPLING, return_logprob=True)
        assert len(events) > 6
        output = events[-1]
        if incremental:
            output = {**output, "text": "".join(event["text"] for event in events)}
            output["output_ids"] = [token for event in events for token in event["output_ids"]]
            told = [each for event in events for each in event["meta_info"]["output_token_logprobs"]]
            output["meta_info"]["output_token_logprobs"] = told
        check(pairs, output)


@pytest.mark.parametrize("n", [1, 3])
async def test_each_sequence_of_a_batch_meets_its_own_half(start: Start, model: NgramModel, n: int) -> None:
    prompts = [PROMPT, PROMPT + "Once", "Why?"]
    async with disaggregated(start, model) as pairs:
        body: dict[str, Any] = {
            "text": prompts,
            "sampling_params": SAMPLING | {"n": n},
            "return_logprob": True,
        }
        outputs = await pairs.generate(**body)
        events = await streamed(pairs.running.client, **body)
        last = {event["index"]: event for event in events}
        assert len(outputs) == len(last) == 3 * n
        # With n above 1 each engine makes names of its own, so the journals are met by what they say.
        read = [entry for half in pairs.prefills for entry in half.journal()]
        written = [entry for half in pairs.decodes for entry in half.journal()]
        for output in [*outputs, *last.values()]:
            (entry,) = [one for one in written if one["rid"] == output["meta_info"]["id"]]
            assert output["output_ids"] == entry["output_ids"]
            first = (entry["input_ids"], entry["output_ids"][:1], entry["output_logprobs"][:1])
            assert first in [(one["input_ids"], one["output_ids"], one["output_logprobs"]) for one in read]
        for index, output in enumerate(outputs):
            prompt = model.tokenizer.encode(prompts[index // n])
            assert output["meta_info"]["prompt_tokens"] == len(prompt)


async def test_logprobs_of_the_prompt_are_those_of_an_engine_that_does_both(
    start: Start, model: NgramModel
) -> None:
    body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "sampling_params": SAMPLING}
    async with served(lambda: model, Settings()) as alone:
        wanted = (await alone.generate(**body))["meta_info"]["input_token_logprobs"]
    async with disaggregated(start, model) as pairs:
        output = await pairs.generate(**body)
        assert output["meta_info"]["input_token_logprobs"] == wanted
        check(pairs, output)
        for event in await streamed(pairs.running.client, **body):
            assert event["meta_info"]["input_token_logprobs"] == wanted
        batch = await pairs.generate(**(body | {"text": [PROMPT, "Why?"]}))
        assert batch[0]["meta_info"]["input_token_logprobs"] == wanted


@pytest.mark.parametrize("start_len", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_routed_experts_are_those_of_both_engines(
    start: Start, model: NgramModel, start_len: int, stream: bool
) -> None:
    moe: dict[str, Any] = {"moe_layers": 3, "moe_experts": 8, "moe_topk": 1}
    body = {"return_routed_experts": True, "routed_experts_start_len": start_len, "sampling_params": SAMPLING}
    async with disaggregated(start, model, **moe) as pairs:
        for words in range(4):  # base64 ends in each of its three ways
            body["text"] = PROMPT + "a" * words
            client = pairs.running.client
            output = (await streamed(client, **body))[-1] if stream else await pairs.generate(**body)
            (entry,) = pairs.decodes[0].journal(output["meta_info"]["id"])
            wanted = routed_experts(entry["input_ids"] + entry["output_ids"], start_len, Settings(**moe))
            told = np.frombuffer(base64.b64decode(output["meta_info"]["routed_experts"]), "<i4")
            assert told.tolist() == wanted.ravel().tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_under_two_versions_says_which_token_is_of_which(
    start: Start, model: NgramModel, stream: bool
) -> None:
    async with disaggregated(
        start, model, prefill={"weight_version": "6"}, decode={"weight_version": "7"}
    ) as pairs:
        body = {"sampling_params": SAMPLING}
        events = await streamed(pairs.running.client, **body) if stream else [await pairs.generate(**body)]
        for event in events:
            count = event["meta_info"]["completion_tokens"]
            later = [{"version": "7", "start": 1, "end": count}] if count > 1 else []
            spans = [{"version": "6", "start": 0, "end": 1}, *later]
            assert event["meta_info"]["weight_versions"] == spans
        check(pairs, events[-1])


async def test_decode_workers_with_the_weights_of_the_prefill_worker_come_first(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, decodes=2) as pairs:
        await pairs.running.client.post(
            f"{pairs.decodes[0].url}/update_weight_version", json={"new_version": "8"}
        )
        pairs.running.router.pool.find(pairs.decodes[0].url).weight_version = "8"
        for _ in range(6):
            output = await pairs.generate(sampling_params={"max_new_tokens": 2})
            assert "weight_versions" not in output["meta_info"]
        assert len(pairs.decodes[1].journal()) == 6


async def test_many_at_once_come_to_their_halves_and_all_counts_come_back(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, prefills=2, decodes=2) as pairs:
        outputs: list[dict[str, Any]] = []

        async def one(number: int) -> None:
            body = {"text": f"{PROMPT}{number}", "sampling_params": SAMPLING, "return_logprob": True}
            if number % 2:
                outputs.append((await streamed(pairs.running.client, **body))[-1])
            else:
                outputs.append(await pairs.generate(**body))

        async with anyio.create_task_group() as tasks:
            for number in range(64):
                tasks.start_soon(one, number)
        assert len(outputs) == 64
        for output in outputs:
            check(pairs, output)
        assert all(len(half.journal()) > 16 for half in pairs.halves)


async def test_prefill_worker_counts_until_it_ends_decode_until_the_last_byte(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, tokens_per_second=40) as pairs:
        body = {"text": PROMPT, "stream": True, "sampling_params": SAMPLING}
        async with pairs.running.client.stream("POST", "/generate", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            assert pairs.loads() == [0, 1]
            assert not pairs.prefills[0].busy
            assert [line async for line in lines]
        await until(lambda: pairs.loads() == [0, 0])


# ends


@pytest.mark.parametrize("stream", [False, True])
async def test_both_engines_stop_when_the_client_has_gone(
    start: Start, model: NgramModel, stream: bool
) -> None:
    slow = {"tokens_per_second": 20}
    async with disaggregated(start, model, decode=slow) as pairs:
        body = {
            "text": PROMPT,
            "rid": "gone",
            "stream": stream,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
        with anyio.move_on_after(0.5):
            await pairs.running.client.post("/generate", json=body)
        await until(lambda: not pairs.decodes[0].busy)
        (written,) = pairs.decodes[0].journal("gone")
        assert written["aborted"]
        assert 0 < len(written["output_ids"]) < 100


async def test_an_engine_that_waits_for_its_half_stops_when_the_client_has_gone(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, prefill={"latency_ms": 60_000}) as pairs:
        with anyio.move_on_after(0.3):
            await pairs.running.client.post("/generate", json={"text": PROMPT, "rid": "gone"})
        await until(lambda: not any(half.busy for half in pairs.halves))
        assert [half.journal("gone")[0]["aborted"] for half in pairs.halves] == [True, True]


async def test_abort_ends_the_decode_and_the_client_gets_what_there_is(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, decode={"tokens_per_second": 30}) as pairs:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(
                await pairs.generate(rid="mine", sampling_params={"max_new_tokens": 400, "ignore_eos": True})
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: any(len(one["output_ids"]) > 2 for one in pairs.decodes[0].journal("mine")))
            said = await pairs.running.client.post("/abort_request", json={"rid": "mine"})
            assert [*said.json()["workers"]] == [pairs.decodes[0].url]  # the prefill engine has ended
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
        check(pairs, answers[0])


async def test_an_abort_while_the_prompt_is_read_ends_both(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model, prefill={"latency_ms": 60_000}) as pairs:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await pairs.generate(rid="mine"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: all(half.busy for half in pairs.halves))
            await pairs.running.client.post("/abort_request", json={"rid": "mine"})
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_dying_prefill_engine_ends_its_decode_and_another_pair_answers(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, prefills=2, prefill={"latency_ms": 2500}) as pairs:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await pairs.generate(rid="moved", sampling_params=SAMPLING))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: any(half.busy for half in pairs.prefills))
            (dead,) = [half for half in pairs.prefills if half.busy]
            await dead.end()
        (left,) = [half for half in pairs.prefills if half is not dead]
        (read,) = left.journal("moved")
        abandoned, written = pairs.decodes[0].journal("moved")
        assert abandoned["aborted"]
        assert abandoned["output_ids"] == []
        assert answers[0]["output_ids"] == written["output_ids"]
        assert read["output_ids"] == written["output_ids"][:1]


async def test_a_prefill_engine_that_is_dead_is_not_chosen_for_long(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model, prefills=2) as pairs:
        await pairs.prefills[0].end()
        for _ in range(8):
            check_one = await pairs.generate(sampling_params=SAMPLING)
            assert len(check_one["output_ids"]) == 12
        assert not any(entry["output_ids"] for entry in pairs.prefills[0].journal())


async def test_dying_decode_engine_ends_its_prefill_and_another_pair_answers(
    start: Start, model: NgramModel
) -> None:
    async with disaggregated(start, model, decodes=2, prefill={"latency_ms": 2500}) as pairs:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await pairs.generate(rid="moved", sampling_params=SAMPLING))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: any(half.busy for half in pairs.decodes) and pairs.prefills[0].busy > 0)
            (dead,) = [half for half in pairs.decodes if half.busy]
            await dead.end()
        abandoned, read = pairs.prefills[0].journal("moved")
        assert abandoned["aborted"]
        (left,) = [half for half in pairs.decodes if half is not dead]
        (written,) = left.journal("moved")
        assert answers[0]["output_ids"] == written["output_ids"]
        assert read["output_ids"] == written["output_ids"][:1]


async def test_a_decode_engine_that_dies_in_a_stream_breaks_it_off(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model, decodes=2, decode={"tokens_per_second": 20}) as pairs:
        body = {
            "text": PROMPT,
            "stream": True,
            "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        }

        async def read() -> None:
            async with pairs.running.client.stream("POST", "/generate", json=body) as answer:
                async for _ in answer.aiter_lines():
                    for half in pairs.decodes:
                        if half.busy:
                            await half.end()

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        assert sum(len(half.journal()) for half in pairs.decodes) == 1


async def test_without_another_pair_the_client_is_told(start: Start, model: NgramModel) -> None:
    async with disaggregated(
        start, model, "--retry-max-retries", "2", prefill={"latency_ms": 60_000}
    ) as pairs:
        status: list[int] = []

        async def ask() -> None:
            status.append((await pairs.running.client.post("/generate", json={"text": PROMPT})).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: all(half.busy for half in pairs.halves))
            await pairs.prefills[0].end()
        assert status == [502]


# other plugins


async def test_a_conversation_is_exact_behind_the_radix_cache(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint)
    async with disaggregated(start, model, *flags, prefills=2, decodes=2) as pairs:
        text = PROMPT
        # A special token that is sampled and not in the text would not be in the text's tokens either.
        sampling = SAMPLING | {"skip_special_tokens": False}
        for turn in range(4):
            body = {"text": text, "rid": f"turn{turn}", "session_id": "s", "sampling_params": sampling}
            output = await pairs.generate(**body)
            check(pairs, output)
            text += output["text"] + "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        (last,) = [entry for half in pairs.decodes for entry in half.journal("turn3")]
        told = (
            await pairs.running.client.post("/retrieve_from_text", json={"text": text, "session_id": "s"})
        ).json()
        whole = last["input_ids"] + last["output_ids"]
        assert told["tokens"][: len(whole)] == whole
        assert told["loss_mask"][len(last["input_ids"]) : len(whole)] == [1] * len(last["output_ids"])
        logprobs = told["rollout_logp"][len(last["input_ids"]) : len(whole)]
        assert logprobs == last["output_logprobs"]
        # A session keeps its prefill worker.
        assert sorted(len(half.journal()) for half in pairs.prefills) == [0, 4]


async def test_chats_go_through_a_pair(start: Start, model: NgramModel, checkpoint: str) -> None:
    flags = ("--plugin", "radix_cache", "--plugin", "openai", "--hf-checkpoint", checkpoint)
    async with disaggregated(start, model, *flags) as pairs:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "n": 2}
        answer = await pairs.running.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 2
        assert all(len(half.journal()) == 2 for half in pairs.halves)


async def test_an_update_reaches_both_and_answers_are_of_one_version(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model, prefills=2, decodes=2) as pairs:
        update = {"model_path": "/weights", "weight_version": "2"}
        said = (await pairs.running.client.post("/update_weights_from_disk", json=update)).json()
        assert sorted(said["workers"]) == sorted(half.url for half in pairs.halves)
        output = await pairs.generate(sampling_params=SAMPLING)
        assert output["meta_info"]["weight_version"] == "2"
        assert "weight_versions" not in output["meta_info"]
        stats = (await pairs.running.client.get("/workers")).json()["stats"]
        assert stats == {"regular_count": 0, "prefill_count": 2, "decode_count": 2}


async def test_generations_aborted_by_an_update_resume_as_pairs_exactly(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    flags = (
        "--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--resume-aborted", "--abort-retry-wait-s", "0.2",
    )  # fmt: skip
    slow: dict[str, Any] = {"tokens_per_second": 60}
    async with disaggregated(start, model, *flags, prefills=2, decodes=2, **slow) as pairs:
        outputs: dict[str, dict[str, Any]] = {}

        async def generate(number: int) -> None:
            sampling = {"max_new_tokens": 40, "ignore_eos": True}
            body = {"text": f"{PROMPT}{number}", "rid": f"r{number}", "sampling_params": sampling}
            if number % 2:
                outputs[f"r{number}"] = (await streamed(pairs.running.client, **body))[-1]
            else:
                outputs[f"r{number}"] = await pairs.generate(**body)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(generate, number)
            await until(
                lambda: (
                    sum(len(entry["output_ids"]) for half in pairs.decodes for entry in half.journal()) > 60
                )
            )
            client = pairs.running.client
            await client.post("/pause_generation", json={"mode": "abort"})
            update = {"model_path": "/weights", "weight_version": "2"}
            assert (await client.post("/update_weights_from_disk", json=update)).status_code == 200
            await client.post("/continue_generation", json={})
        for rid, output in outputs.items():
            written = [
                entry for half in pairs.decodes for entry in half.journal() if entry["rid"].startswith(rid)
            ]
            parts = sorted(written, key=lambda entry: len(entry["input_ids"]))
            assert output["output_ids"] == [token for entry in parts for token in entry["output_ids"]]
            versions = [version for entry in parts for version in entry["output_versions"]]
            assert set(versions) == {"default", "2"}
            told = (
                await pairs.running.client.post(
                    "/retrieve_from_text", json={"text": f"{PROMPT}{rid[1:]}{output['text']}"}
                )
            ).json()
            assert told["exact"], told["inexact_reason"]
            assert told["tokens"][-40:] == output["output_ids"]
            assert [str(version) for version in told["generation_versions"][-40:]] == versions


@pytest.mark.slow
async def test_in_a_storm_all_counts_come_back(start: Start, model: NgramModel) -> None:
    """Clients that leave at any time, aborts of others; what is answered is right."""
    chance = random.Random(7)
    moods: dict[str, Any] = {"tokens_per_second": 200}
    async with disaggregated(start, model, prefills=2, decodes=2, **moods) as pairs:
        answered: list[dict[str, Any]] = []

        async def one(number: int) -> None:
            await anyio.sleep(chance.uniform(0, 1.5))
            rid, stream = f"r{number}_", chance.random() < 0.5
            body = {"rid": rid, "sampling_params": SAMPLING, "return_logprob": True}
            with anyio.move_on_after(chance.uniform(0.01, 0.1) if chance.random() < 0.4 else 20):
                try:
                    if stream:
                        output = (await streamed(pairs.running.client, **body))[-1]
                    else:
                        output = await pairs.generate(**body)
                except (httpx.RemoteProtocolError, AssertionError, KeyError):
                    return  # told clearly; of a stream that broke off the end is missing
                answered.append(output)

        async def trouble() -> None:
            for _ in range(20):
                await anyio.sleep(0.08)
                await pairs.running.client.post("/abort_request", json={"rid": f"r{chance.randrange(200)}_"})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trouble)
            for number in range(200):
                tasks.start_soon(one, number)
        assert len(answered) > 80
        for output in answered:
            written = [entry for half in pairs.decodes for entry in half.journal(output["meta_info"]["id"])]
            assert (output["output_ids"], rows(output)) in [
                (
                    entry["output_ids"],
                    list(zip(entry["output_logprobs"], entry["output_ids"], strict=True)),
                )
                for entry in written
            ]


@pytest.mark.parametrize("stream", [False, True])
async def test_experts_that_only_the_decode_engine_tells_are_left_out(
    start: Start, model: NgramModel, stream: bool
) -> None:
    moe: dict[str, Any] = {"moe_layers": 3, "moe_experts": 8, "moe_topk": 1}
    body = {"return_routed_experts": True, "sampling_params": SAMPLING}
    async with disaggregated(start, model, decode=moe) as pairs:
        client = pairs.running.client
        output = (await streamed(client, **body))[-1] if stream else await pairs.generate(**body)
        check(pairs, output)
        assert "routed_experts" not in output["meta_info"]
