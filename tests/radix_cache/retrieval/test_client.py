"""``slime_radix_cache.client``: what rollout code gets into its samples."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import pytest

from radix_cache.scripted import Client as Rollout
from radix_cache.scripted import bits
from slime_radix_cache import client as client_module
from slime_radix_cache.client import AsyncClient, Client, NotExact, RequestFailed, fill_sample

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[3] / "docs" / "plugins" / "radix_cache.md"
PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class ClientSample:
    """The attributes of slime's that matter here."""

    prompt: Any = PROMPT
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    session_id: str | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    status: Status = Status.PENDING


def five_lines() -> str:
    """The rollout function of the documentation."""
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_five_lines_are_five_and_stand_in_the_module_too() -> None:
    lines = [line for line in five_lines().splitlines() if line]
    assert len(lines) == 5
    assert client_module.__doc__ is not None
    shown = inspect.cleandoc(client_module.__doc__)
    assert [line for line in lines if line not in shown] == []


@pytest.mark.parametrize("session", [None, "ses/sion é"])
async def test_the_five_lines_fill_a_sample_with_what_the_engine_says(
    start: Start, session: str | None
) -> None:
    async with start("--plugin", "engine", "--plugin", "radix_cache") as running:
        names: dict[str, Any] = {"AsyncClient": AsyncClient}
        exec(five_lines().replace("http://127.0.0.1:30000", running.url), names)
        async with names["router"]:
            sample = await names["generate"](None, ClientSample(session_id=session), {"max_new_tokens": 20})
        (engine,) = (await running.client.get("/list_workers")).json()["urls"]
        (entry,) = (await running.client.get(f"{engine}/journal")).json()["entries"]
    assert sample.response == entry["text"]
    assert sample.tokens == entry["input_ids"] + entry["output_ids"]
    assert sample.response_length == len(entry["output_ids"])
    assert sample.loss_mask == [1] * len(entry["output_ids"])
    assert bits(sample.rollout_log_probs) == bits(entry["output_logprobs"])
    assert sample.weight_versions == ["default"]
    ended = {"length": ClientSample.Status.TRUNCATED, "stop": ClientSample.Status.COMPLETED}
    assert sample.status is ended[entry["finish_reason"]["type"]]


async def test_text_of_the_environment_is_in_the_response_with_mask_0(client: Rollout) -> None:
    async with AsyncClient(client.running.url) as router:
        sample = ClientSample()
        sample.response = (await client.generate(PROMPT, [5, 6, 7]))["text"] + NEXT
        client.engine.meta = {"weight_version": "2"}
        sample.response += (await client.generate(PROMPT + sample.response, [8, client.engine.eos]))["text"]
        await router.fill(sample)
    tokens, _, _ = client.last()
    prompt = len(client.engine.consumed[0])
    environment = len(client.engine.consumed[1]) - prompt - 3
    assert sample.tokens == tokens
    assert sample.loss_mask == [1] * 3 + [0] * environment + [1] * 2
    assert sample.rollout_log_probs is not None
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    assert sample.rollout_log_probs[3 : 3 + environment] == [0.0] * environment
    assert sample.weight_versions == ["1", "2"]
    assert sample.status is ClientSample.Status.COMPLETED


async def test_synchronous_code_gets_the_same(client: Rollout) -> None:
    await client.generate(PROMPT, [5, 6], session="s")
    text = PROMPT + client.engine.tokenizer.decode([5, 6])
    client.engine.script.append([7])

    def rollout() -> tuple[Any, ...]:
        with Client(client.running.url) as router:
            sample = ClientSample(response=text.removeprefix(PROMPT), session_id="s")
            answer = router.generate("new", {"max_new_tokens": 1}, session="t", rid="r1")
            return (
                answer,
                router.fill(sample, session="s"),
                router.retrieve(text, session="s"),
                router.trajectories("s"),
            )

    answer, sample, retrieved, (record,) = await anyio.to_thread.run_sync(rollout)
    assert answer["output_ids"] == [7]
    assert client.engine.asked[-1]["rid"] == "r1"
    assert sample.tokens == client.engine.consumed[0] + [5, 6]
    async with AsyncClient(client.running.url) as router:
        theirs = [await router.retrieve(text, session="s"), *await router.trajectories("s")]
    for ours, their in zip((retrieved, record), theirs, strict=True):
        assert {key: str(value) for key, value in ours.items()} == {
            key: str(value) for key, value in their.items()
        }
    plain = await client.retrieve(text, session_id="s")
    listed = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in retrieved.items()}
    assert listed == plain


async def test_a_record_of_a_session_makes_a_sample_with_prompt_and_response(client: Rollout) -> None:
    answer = await client.generate(PROMPT, [5, 6], session="s")
    async with AsyncClient(client.running.url) as router:
        assert (await router.session("s"))["complete"] is True
        (record,) = await router.trajectories("s")
    sample = fill_sample(ClientSample(prompt="", response=""), record)
    assert (sample.prompt, sample.response) == (PROMPT, answer["text"])
    assert (sample.response_length, sample.loss_mask) == (2, [1, 1])
    assert sample.status is ClientSample.Status.TRUNCATED


async def test_inexact_answer_is_raised_unless_allowed(client: Rollout) -> None:
    answer = await client.generate(PROMPT, [5, 6], return_logprob=False)
    async with AsyncClient(client.running.url) as router:
        sample = ClientSample(response=answer["text"])
        with pytest.raises(NotExact, match="no_logprobs") as raised:
            await router.fill(sample)
        assert (raised.value.reason, sample.tokens) == ("no_logprobs", [])
        await router.fill(sample, allow_inexact=True)
        assert sample.tokens == client.last()[0]
        assert sample.rollout_log_probs is not None
        assert all(map(math.isnan, sample.rollout_log_probs))
        with pytest.raises(NotExact, match=r"uncovered_text \(0 of 5 characters were recorded\)"):
            await router.fill(ClientSample(prompt="never", response=""))


async def test_where_nothing_was_sampled_there_is_no_response(client: Rollout) -> None:
    await client.generate(PROMPT, [5, 6])
    async with AsyncClient(client.running.url) as router:
        sample = await router.fill(ClientSample())
    assert sample.tokens == client.engine.consumed[0]
    assert (sample.response_length, sample.loss_mask, sample.rollout_log_probs) == (0, [], [])
    assert (sample.weight_versions, sample.status) == ([], ClientSample.Status.PENDING)


async def test_a_sample_needs_no_status(client: Rollout) -> None:
    class Bare:
        prompt, response = PROMPT, ""

    bare = Bare()
    bare.response = (await client.generate(PROMPT, [5]))["text"]
    async with AsyncClient(client.running.url) as router:
        filled = await router.fill(bare)
    assert vars(filled)["tokens"][-1] == 5
    assert "status" not in vars(filled)


async def test_a_prompt_that_is_no_text_is_refused(client: Rollout) -> None:
    async with AsyncClient(client.running.url) as router:
        with pytest.raises(TypeError, match=r"sample\.prompt is a list"):
            await router.fill(ClientSample(prompt=[{"role": "user", "content": "Why?"}]))


async def test_errors_have_status_and_message_of_who_made_them(client: Rollout) -> None:
    async with AsyncClient(client.running.url) as router:
        with pytest.raises(RequestFailed, match="404: nothing is kept of session 'nobody'") as raised:
            await router.trajectories("nobody")
        assert raised.value.status == 404
        client.engine.script.append((400, b'{"object": "error", "message": "too long"}'))
        with pytest.raises(RequestFailed, match="400: too long"):
            await router.generate(PROMPT, {})
        client.engine.script.append((502, b"<html>"))
        with pytest.raises(RequestFailed, match="502: wanted JSON or msgpack, got <html>"):
            await router.generate(PROMPT, {})
        client.engine.script.append((400, b'["no"]'))
        with pytest.raises(RequestFailed, match=r"400: \['no'\]"):
            await router.generate(PROMPT, {})
        client.engine.script.append((400, b'{"error": "flat"}'))
        with pytest.raises(RequestFailed, match="400: flat"):
            await router.generate(PROMPT, {})
