"""Two messages are the same when the template writes them alike: nothing else about them is overlooked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat.chatting import chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat_models.families import LLAMA, MISTRAL, QWEN2_5, QWEN3, Family
from openai_.drift.rollouts import TOOLS

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "time", "arguments": {"place": "Rio"}}\n</tool_call>'
SIBLINGS = ("if x:\n    return 1", "    if x:\n        return 1", "if x:\n    return 1\n")


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    """A message with one call, as a client writes it."""
    function = {"name": "time", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **more,
    }


def result(content: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
    calls = (message or {}).get("tool_calls") or [{"id": "c1"}]
    return {"role": "tool", "content": content, "tool_call_id": calls[0]["id"]}


async def test_white_space_of_a_prompt_tells_conversations_apart(start: Start) -> None:
    async with chatting(start, "Same.", family=QWEN2_5) as chat:
        asked = [await chat.post(messages=[user(text)], session_id="s", **ASK) for text in SIBLINGS]
        for text, before in zip(SIBLINGS, asked, strict=True):
            more = [user(text), said(before), user("b")]
            after = await chat.post(messages=more, session_id="s", **ASK)
            assert is_continued(after, before)
            assert chat.read(after["prompt_token_ids"]).count(f"user\n{text}<|im_end|>") == 1


async def test_white_space_of_a_system_prompt_tells_conversations_apart(start: Start) -> None:
    async with chatting(start, "Same.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[{"role": "system", "content": "S"}, user("a")], **ASK)
        more = [{"role": "system", "content": "S\n"}, user("a"), said(first), user("b")]
        assert (await chat.post(messages=more, **ASK))["history"] == "fresh"


async def test_white_space_of_a_result_tells_conversations_apart(start: Start) -> None:
    async with chatting(start, CALL, "Same.", family=QWEN2_5) as chat:
        called = await chat.post(messages=[user("a")], tools=TOOLS, session_id="s", **ASK)
        message = called["choices"][0]["message"]
        told = {}
        for content in ("42", "  42\n\n"):
            history = [user("a"), message, result(content, message)]
            told[content] = await chat.post(messages=history, tools=TOOLS, session_id="s", **ASK)
            assert is_continued(told[content], called)
        for content, before in told.items():
            more = [user("a"), message, result(content, message), said(before), user("b")]
            assert is_continued(await chat.post(messages=more, tools=TOOLS, session_id="s", **ASK), before)


async def test_white_space_that_a_template_trims_makes_no_other_conversation(start: Start) -> None:
    """Llama's trims what users say; it writes a result as the JSON of its text, white space and all."""
    async with chatting(start, "Same.", family=LLAMA) as chat:
        first = await chat.post(messages=[user(" a\n")], **ASK)
        second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
        assert is_continued(second, first)


#: Arguments, and what they may be mistaken for.
EDITS = {
    "large integers": ('{"place": 18446744073709551616}', '{"place": 18446744073709551617}'),
    "long fractions": ('{"place": 0.12345678901234567890}', '{"place": 0.12345678901234567891}'),
    "repeated keys": ('{"place": "A", "place": "B"}', '{"place": "B"}'),
    "a fraction": ('{"place": 1}', '{"place": 1.0}'),
    "a boolean": ('{"place": 1}', '{"place": true}'),
}


def called_by_model(family: Family, arguments: str) -> str:
    """The text with which a model of ``family`` makes a call."""
    call = f'{{"name": "time", "arguments": {arguments}}}'
    return {
        QWEN2_5.name: f"<tool_call>\n{call}\n</tool_call>",
        QWEN3.name: f"<tool_call>\n{call}\n</tool_call>",
        LLAMA.name: call.replace("arguments", "parameters"),
        MISTRAL.name: f"[TOOL_CALLS] [{call}]",
    }[family.name]


@pytest.mark.parametrize("family", [QWEN2_5, QWEN3, LLAMA, MISTRAL], ids=lambda family: family.name)
async def test_edited_arguments_make_another_conversation(start: Start, family: Family) -> None:
    """Of a call that the client itself wrote, and of one that the model made."""
    async with chatting(start, "Two.", family=family) as chat:
        for case, (written, edited) in EDITS.items():
            named = {"tools": TOOLS, "session_id": f"written, {case}", **ASK}
            begun = [user(f"a, {case}"), calling(written), result("1")]
            for message in begun[1]["tool_calls"]:
                message["id"] = begun[2]["tool_call_id"] = "c00000001"
            first = await chat.post(messages=begun, **named)
            assert first["history"] == "fresh", case
            for arguments, same in ((written, True), (edited, False)):
                changed = json.loads(json.dumps(begun))
                changed[1]["tool_calls"][0]["function"]["arguments"] = arguments
                after = await chat.post(messages=[*changed, said(first), user("b")], **named)
                assert (after["history"] == "exact") is same, case
        for case, (written, edited) in EDITS.items():
            named = {"tools": TOOLS, "session_id": f"made, {case}", **ASK, "max_tokens": 200}
            chat.script[:] = [called_by_model(family, written), "Two."]
            first = await chat.post(messages=[user(f"a, {case}")], **named)
            message = first["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["arguments"] == written, case
            for arguments, same in ((written, True), (edited, False)):
                changed = json.loads(json.dumps(message))
                changed["tool_calls"][0]["function"]["arguments"] = arguments
                more = [user(f"a, {case}"), changed, result("1", changed)]
                after = await chat.post(messages=more, **named)
                assert is_continued(after, first) is same, case


async def test_arguments_sent_as_objects_lose_nothing(start: Start) -> None:
    """Their digits and keys are the client's, also where a parser of JSON has room for fewer."""
    async with chatting(start, "Two.", family=QWEN3) as chat:
        for written, shown in (
            ('{"place":18446744073709551617}', '{"place": 18446744073709551617}'),
            ('{"place":1.10}', '{"place": 1.1}'),
            ('{"place":0.12345678901234567890}', '{"place": 0.12345678901234567890}'),
            ('{"place":"A","place":"B"}', '{"place": "A", "place": "B"}'),
        ):
            placeholder = json.dumps({"messages": [user("a"), calling({}), result("1")], **ASK})
            body = placeholder.replace('"arguments": {}', f'"arguments": {written}')
            answer = await chat.running.client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 200, answer.text
            prompt = chat.read(answer.json()["prompt_token_ids"])
            written_by_template = prompt.split('"arguments": ')[1].split("}\n</tool_call>")[0]
            assert written_by_template == shown


async def test_white_space_of_an_answer_chooses_no_other_answer(start: Start) -> None:
    """Two answers that differ in nothing else: the one that came back is meant, and without it none is."""
    async with chatting(start, "  x", "x  ", "More.", family=QWEN2_5) as chat:
        chat.script[:] = [("  x", "x  "), "More."]
        both: dict[str, Any] = {}
        first = await chat.post(messages=[user("a")], n=12, session_id="s", **ASK)
        for choice in first["choices"]:
            both[choice["message"]["content"]] = choice["index"]  # the newest of each
        assert both.keys() == {"  x", "x  "}
        for content, index in both.items():
            more = [user("a"), {"role": "assistant", "content": content}, user("b")]
            assert is_continued(await chat.post(messages=more, session_id="s", **ASK), first, index)
        stripped = [user("a"), {"role": "assistant", "content": "x"}, user("b")]
        after = await chat.post(messages=stripped, session_id="s", **ASK)
        assert after["history"] == "fresh"


async def test_white_space_of_client_written_answers_tells_conversations_apart(start: Start) -> None:
    """No engine gave it, so nothing of it is a client's habit."""
    async with chatting(start, "Same.", family=QWEN2_5) as chat:
        begun = {
            content: [user("a"), {"role": "assistant", "content": content}, user("b")]
            for content in ("x", "  x", "x\n")
        }
        asked = {key: await chat.post(messages=each, session_id="s", **ASK) for key, each in begun.items()}
        for content, before in asked.items():
            more = [*begun[content], said(before), user("c")]
            assert is_continued(await chat.post(messages=more, session_id="s", **ASK), before)


async def test_words_that_are_gone_on_with_are_those_that_the_client_sent(start: Start) -> None:
    """Generated text is appended to the words, so no white space is put back."""
    async with chatting(start, "One two three.", "Two.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **{**ASK, "max_tokens": 6})
        words = said(first)["content"]
        for content in (words, f"{words} "):
            begun = [user("a"), {"role": "assistant", "content": content}]
            after = await chat.post(messages=begun, continue_final_message=True, session_id="s", **ASK)
            assert chat.read(after["prompt_token_ids"]).endswith(f"assistant\n{content}")
            assert (after["history"] == "exact") is (content == words)


async def test_an_answer_that_the_template_refuses_is_put_back_all_the_same(
    start: Start, tmp_path: Path
) -> None:
    """The client made of it what the template takes; its tokens are what the model said."""
    template = QWEN2_5.template.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages -%}{%- if message.content.startswith(' ') -%}"
        "{{- raise_exception('no') -}}{%- endif -%}",
    )
    path = tmp_path / "template"
    path.write_text(template)
    async with chatting(start, " x", "Two.", family=QWEN2_5, flags=("--chat-template", str(path))) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        stripped = [user("a"), {"role": "assistant", "content": "x"}, user("b")]
        second = await chat.post(messages=stripped, session_id="s", **ASK)
        assert is_continued(second, first)
        assert second["history"] == "restored"


async def test_arguments_nested_too_deep_are_refused(start: Start) -> None:
    async with chatting(start, "Two.", family=QWEN2_5) as chat:
        for depth in (300, 1000):
            placeholder = json.dumps({"messages": [user("a"), calling({}), result("1")]})
            body = placeholder.replace(
                '"arguments": {}', '"arguments": ' + '{"a":' * depth + "1" + "}" * depth
            )
            answer = await chat.running.client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("messages")


async def test_a_history_with_other_white_space_in_an_answer_says_so(start: Start) -> None:
    async with chatting(start, "  x", "Two.", "Three.", family=QWEN2_5) as chat:
        first = await chat.post(messages=[user("a")], session_id="s", **ASK)
        stripped = [user("a"), {"role": "assistant", "content": "x"}, user("b")]
        second = await chat.post(messages=stripped, session_id="s", **ASK)
        assert second["history"] == "restored"
        known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert second["prompt_token_ids"][: len(known)] == known
        third = await chat.post(messages=[*stripped, said(second), user("c")], session_id="s", **ASK)
        assert third["history"] == "restored", "the answer of two turns ago was changed, and still is"
        (leaf,) = await chat.trajectories("s")
        assert leaf["exact"]
