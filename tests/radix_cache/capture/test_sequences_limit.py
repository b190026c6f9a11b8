"""The limit of sequences that one request may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from radix_cache.outputs import output
from radix_cache.scripted import ScriptedEngine, routed
from router_core.cli import build
from router_core.errors import SettingsError

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("flags", "body", "got"),
    [
        ((), {"text": "hi", "sampling_params": {"n": 10**9}}, "1 prompts with n = 1000000000"),
        (
            (),
            {"text": "hi", "sampling_params": {"n": 10**9}, "stream": True},
            "1 prompts with n = 1000000000",
        ),
        (("4",), {"text": ["hi"] * 3, "sampling_params": {"n": 2}}, "3 prompts with n = 2"),
        (("4",), {"input_ids": [[5]] * 5}, "5 prompts with n = 1"),
    ],
)
async def test_too_many_are_refused_before_an_engine_is_asked(
    start: Start,
    engine: ScriptedEngine,
    checkpoint: str,
    flags: tuple[str, ...],
    body: dict[str, Any],
    got: str,
) -> None:
    limit = [value for flag in flags for value in ("--max-sequences-per-request", flag)]
    async with routed(start, engine, checkpoint, *limit) as client:
        answer = await client.running.client.post("/generate", json=body)
        assert (answer.status_code, engine.asked) == (400, [])
        wanted = flags[0] if flags else "16384"
        assert answer.json()["error"]["message"] == (
            f"wanted at most {wanted} sequences in one request (--max-sequences-per-request), got {got}"
        )


async def test_more_prompts_than_are_parsed_are_refused(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint) as client:
        answer = await client.running.client.post("/generate", json={"text": ["hi"] * 70_000})
        assert (answer.status_code, engine.asked) == (400, [])
        assert answer.json()["error"]["message"].startswith("wanted at most 65536 strings, lists and objects")


async def test_allowed_number_of_sequences_is_sampled(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint, "--max-sequences-per-request", "4") as client:
        twins = [output(client, [token]) for token in (5, 6, 7, 8)]
        engine.script.append((200, orjson.dumps(twins)))
        body = {"text": "hi", "sampling_params": {"n": 4}, "session_id": "s"}
        assert (await client.running.client.post("/generate", json=body)).status_code == 200
        assert len(await client.records("s")) == 4


def test_a_limit_that_lets_nothing_pass_is_refused(checkpoint: str) -> None:
    with pytest.raises(SettingsError, match="--max-sequences-per-request: wanted 1 or more, got 0"):
        build(["--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--max-sequences-per-request", "0"])
