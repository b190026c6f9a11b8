"""Scripted answers: which prompt gets which, that they are sampled like any other, and an agent's loop over them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest

from engine.served import Serve, Served
from router_core import SettingsError
from slime_engine import add_options, make_plugin
from slime_engine.command import main
from slime_engine.model import NgramModel
from slime_engine.script import Script, read_script

pytestmark = pytest.mark.anyio

Start = Callable[..., AbstractAsyncContextManager[Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"name": "weather", "arguments": {"city": "Ålesund"}}
FIRST = {"reasoning_content": "I need the weather.", "content": "Let me look 🦊.", "tool_calls": [CALL]}
LAST = "Take an umbrella, 京都 or not."
LOOP = (
    {"when": {"user": "umbrella", "turn": 1}, "answer": FIRST},
    {"when": {"tool": "rain"}, "answer": LAST},
)


def script(path: Path, *entries: Any) -> Script:
    file = path / "script.jsonl"
    file.write_text("\n\n".join(map(json.dumps, entries)))
    return read_script(str(file))


def asking(model: NgramModel, *said: str, **more: Any) -> str:
    """The prompt behind these messages, a user's and the assistant's in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more)


async def test_the_first_entry_that_fits_answers(serve: Serve, model: NgramModel, tmp_path: Path) -> None:
    entries = (
        {"when": {"user": "sky", "turn": 2}, "answer": "second"},
        {"when": {"user": "sky"}, "answer": "first"},
        {"when": {"tool": "rain"}, "answer": "wet"},
        {"when": {"prompt": r"<\|im_start\|>system.*parrot"}, "answer": "squawk"},
        {"when": {"prompt": "Once"}, "answer": "upon"},
    )
    result = {"role": "tool", "content": "rain"}
    tools = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "sky"}, result, result], add_generation_prompt=True
    )
    parrot = [{"role": "system", "content": "A parrot."}, {"role": "user", "content": "Hi"}]
    prompts = {
        asking(model, "The sky?"): "first",
        asking(model, "Hi", "Yes.", "sky"): "second",
        asking(model, "Hi", "Yes.", "Well", "No.", "sky"): "first",
        asking(model, "sky and rain"): "first",
        tools: "wet",
        model.tokenizer.apply_chat_template(parrot, add_generation_prompt=True): "squawk",
        "Once": "upon",
    }
    async with serve(script=script(tmp_path, *entries)) as engine:
        answers = await engine.generate(text=list(prompts))
        assert [answer["text"] for answer in answers] == list(prompts.values())
        assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)


async def test_other_prompts_are_answered_by_the_model(
    engine: Served, serve: Serve, model: NgramModel, tmp_path: Path
) -> None:
    body = {"text": asking(model, "Else?"), "sampling_params": {"sampling_seed": 4}}
    async with serve(script=script(tmp_path, *LOOP)) as scripted:
        assert (await scripted.generate(**body))["output_ids"] == (await engine.generate(**body))[
            "output_ids"
        ]


async def test_scripted_tokens_have_the_models_logprobs(
    serve: Serve, model: NgramModel, tmp_path: Path
) -> None:
    async with serve(script=script(tmp_path, {"answer": LAST})) as engine:
        params = {"temperature": 0.5, "top_k": 1}
        events = await engine.stream(
            text=asking(model, "?"), rid="r", return_logprob=True, sampling_params=params
        )
        (entry,) = await engine.journal("r")
    assert events[-1]["text"] == entry["text"] == LAST
    assert len(events) == len(entry["output_ids"])
    ids = [*entry["input_ids"], *entry["output_ids"]]
    wanted = model.logprobs(ids, "default", start=len(entry["input_ids"]), temperature=0.5)
    told = [one[0] for one in events[-1]["meta_info"]["output_token_logprobs"]]
    assert told == entry["output_logprobs"] == wanted


async def test_limits_hold_for_scripted_answers(serve: Serve, model: NgramModel, tmp_path: Path) -> None:
    text = asking(model, "?")
    async with serve(script=script(tmp_path, {"answer": LAST}), tokens_per_second=200) as engine:
        cut = await engine.generate(text=text, sampling_params={"max_new_tokens": 3})
        stopped = await engine.generate(text=text, sampling_params={"stop": "umb"})
        longer = await engine.generate(
            text=text, sampling_params={"min_new_tokens": 60, "max_new_tokens": 64}
        )
        async with anyio.create_task_group() as tasks:
            answers: list[Any] = []

            async def ask() -> None:
                answers.append(await engine.generate(text=text, rid="gone"))

            tasks.start_soon(ask)
            await engine.until(
                lambda scheduler: any(s.completion_tokens > 1 for s in scheduler.running.values())
            )
            await engine.post("/abort_request", rid="gone")
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert stopped["text"] == "Take an "
    assert longer["text"].startswith(LAST)
    assert longer["meta_info"]["completion_tokens"] >= 60
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answers[0]["text"]) < len(LAST)


async def test_an_answer_that_was_cut_is_gone_on_with(
    serve: Serve, model: NgramModel, tmp_path: Path
) -> None:
    ids = model.tokenizer.encode(asking(model, "?"))
    async with serve(script=script(tmp_path, {"answer": LAST})) as engine:
        whole = (await engine.generate(input_ids=ids))["output_ids"]
        for kept in (1, len(whole) - 1):
            rest = await engine.generate(input_ids=ids + whole[:kept])
            assert rest["output_ids"] == whole[kept:]


async def test_a_script_of_another_form_than_the_grammar_is_refused(
    serve: Serve, model: NgramModel, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    long = {"answer": {"tool_calls": [{"name": "weather", "arguments": {"city": "by the sea " * 20}}]}}
    forced = {"tool_choice": "required", "tools": [TOOL], "messages": [{"role": "user", "content": "?"}]}
    text = asking(model, "?")
    async with serve(script=script(tmp_path, long)) as engine:
        answer = (await engine.post("/v1/chat/completions", **forced, max_tokens=300)).json()
        (call,) = json.loads(answer["choices"][0]["message"]["content"])
        assert call == {"name": "weather", "parameters": long["answer"]["tool_calls"][0]["arguments"]}
        refused = await engine.generate(400, text=text, sampling_params={"regex": "[a-z]*"})
    assert "script.jsonl:1) is not what the request's grammar allows" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("{}\n", 'script.jsonl:1: wanted {"when": {...}, "answer": ...}'),
        ('{"answer": "a"}\n\n{"answer"\n', "script.jsonl:3: not JSON"),
        ('["answer"]', "an entry must be an object"),
        ('{"answer": "a", "if": {}}', "an entry may have when, answer, got if"),
        ('{"answer": {}}', '"answer" must be text, or an object'),
        ('{"answer": 3}', '"answer" must be an object, got 3'),
        ('{"answer": {"content": null, "text": "a"}}', "got text"),
        ('{"answer": {"tool_calls": {}}}', '"tool_calls" must be a list'),
        ('{"answer": {"tool_calls": [{"name": ""}]}}', "a call must be"),
        ('{"answer": {"tool_calls": [{"name": "a", "arguments": "{}"}]}}', "a call must be"),
        ('{"answer": "a", "when": {"prompt": "("}}', '"prompt" must be a regular expression'),
        ('{"answer": "a", "when": {"turn": 0}}', '"turn" must be a number from 1 on, got 0'),
        ('{"answer": "a", "when": {"user": 1}}', '"user" must be a string, got 1'),
    ],
)
def test_a_bad_script_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, told: str
) -> None:
    (tmp_path / "script.jsonl").write_text(lines)
    assert main(["--script", str(tmp_path / "script.jsonl")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_script_that_is_not_there_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--script", str(tmp_path / "none")]) == 2
    assert "cannot read the script" in capsys.readouterr().err


async def test_an_agents_tool_loop(start: Start, tmp_path: Path) -> None:
    """As docs/plugins/engine.md has it: a router, a scripted engine, and an agent that runs its tools."""
    file = script(tmp_path, *LOOP).path
    flags = ("--plugin", "engine", "--engine-script", file, "--plugin", "radix_cache", "--plugin", "openai")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do I need an umbrella?"}]
    async with start(*flags) as running:
        while True:
            body = {"messages": messages, "tools": [TOOL], "stream": False, "model": "slime-ngram"}
            answer = await running.client.post(
                "/v1/chat/completions", json=body, headers={"x-session-id": "agent"}
            )
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain all day"})
        found = (await running.client.get("/trajectories/agent")).json()
        (worker,) = running.router.pool
        entries = (await running.client.get(f"{worker.url}/journal")).json()["entries"]
    assert messages[1]["reasoning_content"] == FIRST["reasoning_content"]
    assert messages[1]["content"] == FIRST["content"]
    assert messages[-1]["content"] == LAST
    assert len(messages) == 4
    (trajectory,) = found["trajectories"]
    assert trajectory["exact"] is True
    assert trajectory["tokens"] == [*entries[-1]["input_ids"], *entries[-1]["output_ids"]]
    sampled = [
        token for token, mask in zip(trajectory["tokens"], trajectory["loss_mask"], strict=True) if mask
    ]
    assert sampled == [*entries[0]["output_ids"], *entries[1]["output_ids"]]


def test_a_plugin_with_a_bad_script_ends_the_start(tmp_path: Path) -> None:
    parser = ArgumentParser()
    add_options(parser)
    with pytest.raises(SettingsError, match=r"--engine-.*cannot read the script"):
        make_plugin(parser.parse_args(["--engine-script", str(tmp_path / "none")]))
