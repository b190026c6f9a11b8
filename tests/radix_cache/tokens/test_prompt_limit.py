"""The limit of one prompt's tokens, and the tokenisation of a long prompt."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.scripted import ScriptedEngine, routed
from router_core.cli import build
from router_core.errors import BadRequest, SettingsError
from slime_engine.tokenizer import EngineTokenizer
from slime_radix_cache.tokens.encoding import Encoder, PromptTooLong

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

_TEXT = "harbour wakes " * 50
_WANTED = "wanted a prompt of at most 40 tokens (--max-prompt-tokens), got"


@pytest.mark.parametrize(
    ("path", "body", "got"),
    [
        ("/generate", {"text": _TEXT}, "700 characters"),
        ("/generate", {"text": ["hi", _TEXT]}, "700 characters"),
        ("/generate", {"text": "a b c " * 20}, "tokens"),
        ("/generate", {"input_ids": [5] * 41}, "41 tokens"),
        ("/generate", {"input_ids": [[5], [6] * 50]}, "50 tokens"),
        ("/retrieve_from_text", {"text": _TEXT}, "700 characters"),
        ("/v1/completions", {"model": "m", "prompt": [5] * 41}, "41 tokens"),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": _TEXT}]},
            "characters",
        ),
    ],
)
async def test_too_long_prompts_are_refused_before_an_engine_is_asked(
    start: Start,
    engine: ScriptedEngine,
    checkpoint: str,
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    got: str,
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    flags = "--max-prompt-tokens", "40", "--plugin", "openai", "--chat-template", str(template)
    async with routed(start, engine, checkpoint, *flags) as client:
        answer = await client.running.client.post(path, json=body)
        assert (answer.status_code, engine.asked) == (400, [])
        message = answer.json()["error"]["message"]
        assert message.startswith(_WANTED)
        assert message.endswith(got)
        assert (await client.running.client.get("/cache_stats")).json()["entries"] == 0


async def test_a_template_may_leave_out_most_of_a_message(
    start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path
) -> None:
    """Only what is longer than any context is refused before that is known."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content.split('</think>')[-1] }}{% endfor %}")
    flags = "--max-prompt-tokens", "40", "--plugin", "openai", "--chat-template", str(template)

    def chat(thought: str) -> dict[str, Any]:
        said = {"role": "assistant", "content": f"<think>{thought}</think>yes"}
        return {"model": "m", "messages": [{"role": "user", "content": "hi"}, said]}

    async with routed(start, engine, checkpoint, *flags) as client:
        engine.script += [[5], [6]]
        for thought in ("a b " * 200, "a b " * 50_000):
            answer = await client.running.client.post("/v1/chat/completions", json=chat(thought))
            assert answer.status_code == 200, answer.text
        answer = await client.running.client.post("/v1/chat/completions", json=chat("a b " * 4_200_000))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages.[1].content"
        assert error["message"].endswith(
            "'messages.[1].content': wanted at most 16777216 characters, got 16800018."
        )
        assert len(engine.asked) == 2


async def test_a_long_text_is_cut_between_words(tokenizer: EngineTokenizer) -> None:
    line = "The harbour wakes, and {0} boats x{0}y leave it.\nSlowly the garden wakes"
    text = "".join(map(line.format, range(40)))
    encoder = Encoder(tokenizer, long_part=64)
    ids = await encoder.encode(text, begins=True)
    assert array("i", ids).tolist() == tokenizer.encode(text)
    assert encoder.as_dict()["parts_encoded"] > 10


async def test_a_text_without_a_place_to_cut_is_refused_when_it_is_large(tokenizer: EngineTokenizer) -> None:
    with pytest.raises(BadRequest, match="wanted at most 1048576 characters in a row without a place"):
        await Encoder(tokenizer).encode("\u65e5" * 1_100_000, begins=True)


async def test_tokenising_ends_when_there_are_too_many(tokenizer: EngineTokenizer) -> None:
    encoder = Encoder(tokenizer, max_tokens=100_000)
    with pytest.raises(PromptTooLong):
        await encoder.encode("".join(f"a{number}b " for number in range(150_000)), begins=True)
    assert encoder.as_dict()["tokens_encoded"] < 400_000


def test_a_limit_that_lets_no_prompt_pass_is_refused(checkpoint: str) -> None:
    with pytest.raises(SettingsError, match="--max-prompt-tokens: wanted 1 or more, got 0"):
        build(["--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--max-prompt-tokens", "0"])
