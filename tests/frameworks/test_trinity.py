"""Trinity's clients, without Ray: the experiences that its workflows record are the engines' journals."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from logging import getLogger
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

pytest.importorskip("trinity", reason="trinity-rft is not installed")

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS
from frameworks.agents import converse
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
ROLLOUTS = 4


#: Names that its models import of vLLM, for pictures, whatever the engine is.
VLLM = {
    "vllm": (),
    "vllm.config": ("ModelConfig",),
    "vllm.entrypoints": (),
    "vllm.entrypoints.chat_utils": (
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.inputs": ("MultiModalDataDict",),
}


@pytest.fixture(scope="module")
def trinity() -> Any:
    """Its module of models for SGLang; vLLM, without which it cannot be imported, is empty."""
    with pytest.MonkeyPatch.context() as patch:
        for name, wanted in VLLM.items():
            module = ModuleType(name)
            module.__dict__.update(dict.fromkeys(wanted, object))
            patch.setitem(sys.modules, name, module)
        return import_module("trinity.common.models.sglang_model")


def wrapper_of(trinity: Any, fleet: Fleet, session: str) -> Any:
    """Return the model that its workflows get; its address names the session."""
    config = trinity.InferenceModelConfig(
        model_path=fleet.checkpoint,
        engine_type="external",
        enable_openai_api=True,
        enable_history=True,
        enable_thinking=None,
    )
    models = import_module("trinity.common.models.model")
    return models.ModelWrapper(config=config, api_address=f"{fleet.url}/sessions/{session}")


async def roll_out(
    trinity: Any, fleet: Fleet, streamed: bool, meanwhile: Callable[[Any], Awaitable[Any]], **options: Any
) -> dict[str, list[Any]]:
    """The experiences of some conversations by session.

    ``meanwhile`` is called with its client of an engine when all have begun.
    """
    experiences: dict[str, list[Any]] = {}

    async def one(session: str) -> None:
        model = wrapper_of(trinity, fleet, session)
        messages = [{"role": "system", "content": SYSTEM}]
        messages.append({"role": "user", "content": f"{session}. {QUESTION}"})
        async with model.get_openai_async_client() as client:
            # its ``create()`` takes no "not given", which ``stream()`` gives it
            asked = {"model": client.model_path, "logprobs": True, "extra_body": {}, **options}
            await converse(client.chat.completions, messages, streamed=streamed, **asked)
        experiences[session] = model.extract_experience_from_history()

    async with anyio.create_task_group() as rollouts:
        for number in range(ROLLOUTS):
            rollouts.start_soon(one, str(number))
        await fleet.generating(ROLLOUTS)
        await meanwhile(trinity.SGLangClient(fleet.url, None, getLogger(__name__)))
    return experiences


def assert_told(fleet: Fleet, experiences: list[Any]) -> None:
    """Each experience is one entry of a journal, its logprobs in its own precision."""
    entries = [
        (
            len(entry.input_ids),
            [*entry.input_ids, *entry.output_ids],
            np.array(entry.output_logprobs, np.float32).tolist(),
        )
        for entry in fleet.entries()
    ]
    for each in experiences:
        assert (each.prompt_length, each.tokens.tolist(), each.logprobs.tolist()) in entries


@STREAMED
async def test_workflows_with_tools_while_weights_change(start: Start, trinity: Any, streamed: bool) -> None:
    async def update(client: Any) -> None:
        assert await client.update_weights_from_disk("/weights", abort_all_requests=False, weight_version="2")

    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        for session, turns in (await roll_out(trinity, fleet, streamed, update, tools=TOOLS)).items():
            assert len(turns) == 3
            assert_told(fleet, turns)
            [record] = await fleet.trajectories(session)
            assert record["tokens"] == turns[-1].tokens.tolist()
            assert {"1", "2"} <= set(record["generation_versions"])
            assert LAST_WORDS in turns[-1].response_text
            for result in RESULTS:
                assert result in record["text"]


@STREAMED
async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start, trinity: Any, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for session, turns in (await roll_out(trinity, fleet, streamed, lambda _: fleet.abort())).items():
            assert len(turns) == 1
            assert_told(fleet, turns)
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
