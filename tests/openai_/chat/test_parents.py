"""The turn before a prompt, when several could be, or none quite is; and the end of a turn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from openai_.chat.chatting import chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat_models.families import LLAMA, MISTRAL, QWEN2_5
from openai_.drift.rollouts import TOOLS
from slime_http.serving import serving
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.history import History
from slime_openai.requests.messages import Message
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "time", "arguments": {"place": "Rio"}}\n</tool_call>'


class TestAlike:
    async def test_the_ids_of_calls_tell_samples_apart(self, start: Start) -> None:
        async with chatting(start, CALL) as chat:
            first = await chat.post(messages=[user("a")], tools=TOOLS, n=3, session_id="s", **ASK)
            for index in range(3):
                message = {**first["choices"][index]["message"], "refusal": None}
                result = {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]}
                history = [user("a"), message, result]
                second = await chat.post(messages=history, tools=TOOLS, session_id="s", **ASK)
                assert is_continued(second, first, index)

    async def test_thoughts_tell_them_apart_where_they_come_back(self, start: Start) -> None:
        drawn = tuple(f"<think>\n{each}\n</think>\n\nYes." for each in ("AAA", "BBB"))
        async with chatting(start, drawn, "Ok.") as chat:
            first = await chat.post(messages=[user("a")], n=8, **ASK)
            newest = {choice["message"]["reasoning_content"]: choice["index"] for choice in first["choices"]}
            assert newest.keys() == {"AAA", "BBB"}
            for thoughts, index in newest.items():
                message = {**said(first, index), "reasoning_content": thoughts}
                second = await chat.post(messages=[user("a"), message, user("b")], **ASK)
                assert is_continued(second, first, index)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ([{**user("a"), "name": "alice"}], [{**user("a"), "name": "bob"}]),
            ([user("a")], [{**user("a"), "name": "bob"}]),
        ],
    )
    async def test_another_name_is_another_conversation(
        self, start: Start, one: list[dict[str, Any]], other: list[dict[str, Any]]
    ) -> None:
        async with chatting(start, "One.", "Two.") as chat:
            first = await chat.post(messages=one, **ASK)
            second = await chat.post(messages=[*other, said(first), user("b")], **ASK)
            assert second["history"] == "fresh"

    async def test_a_tag_within_the_words_hides_none_of_them(self, start: Start) -> None:
        async with chatting(start, "Write </think> to end.", "Two.", family=QWEN2_5) as chat:
            await chat.post(messages=[user("a")], **ASK)
            other = {"role": "assistant", "content": "Never write </think> to end."}
            second = await chat.post(messages=[user("a"), other, user("b")], **ASK)
            assert second["history"] == "fresh"

    async def test_results_that_change_places_are_others(self, start: Start) -> None:
        written = (f'{{"name": "time", "arguments": {{"place": "{place}"}}}}' for place in "AB")
        calls = f"[TOOL_CALLS] [{', '.join(written)}]"
        async with chatting(start, calls, "Two.", "Three.", family=MISTRAL) as chat:
            first = await chat.post(messages=[user("a")], tools=TOOLS, session_id="s", **ASK)
            message = first["choices"][0]["message"]
            one, two = (call["id"] for call in message["tool_calls"])

            def results(*ids: str) -> list[dict[str, Any]]:
                told = [{"role": "tool", "content": "same", "tool_call_id": each} for each in ids]
                return [user("a"), message, *told]

            second = await chat.post(messages=results(one, two), tools=TOOLS, session_id="s", **ASK)
            assert is_continued(second, first)
            more = [said(second), user("b")]
            swapped = await chat.post(
                messages=[*results(two, one), *more], tools=TOOLS, session_id="s", **ASK
            )
            assert not is_continued(swapped, second)
            again = await chat.post(messages=[*results(one, two), *more], tools=TOOLS, session_id="s", **ASK)
            assert is_continued(again, second)
            unknown = [*results("x00000000", "y00000000"), *more]  # it writes the ids of results
            assert not is_continued(
                await chat.post(messages=unknown, tools=TOOLS, session_id="s", **ASK), second
            )

    async def test_ids_of_results_that_no_template_writes_may_change(self, start: Start) -> None:
        async with chatting(start, f"{CALL}\n{CALL}", "Two.", "Three.") as chat:
            first = await chat.post(messages=[user("a")], tools=TOOLS, session_id="s", **ASK)
            message = first["choices"][0]["message"]

            def results(*ids: str) -> list[dict[str, Any]]:
                told = [{"role": "tool", "content": each[-1], "tool_call_id": each} for each in ids]
                return [user("a"), message, *told]

            second = await chat.post(messages=results("x1", "x2"), tools=TOOLS, session_id="s", **ASK)
            assert is_continued(second, first)
            more = [*results("y1", "y2"), said(second), user("b")]
            assert is_continued(await chat.post(messages=more, tools=TOOLS, session_id="s", **ASK), second)


class TestTorn:
    async def test_an_answer_in_the_middle_that_nobody_gave_is_the_templates(self, start: Start) -> None:
        async with chatting(start, "One.", "Two.", "Three.") as chat:
            first = await chat.post(messages=[user("a")], session_id="s", **ASK)
            second = await chat.post(messages=[user("a"), said(first), user("b")], session_id="s", **ASK)
            assert is_continued(second, first)
            edited = {"role": "assistant", "content": "Deux."}
            history = [user("a"), said(first), user("b"), edited, user("c")]
            third = await chat.post(messages=history, session_id="s", **ASK)
            assert third["history"] == "template"
            known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
            assert third["prompt_token_ids"][: len(known)] == known

    async def test_a_session_that_lost_turns_takes_nobody_elses(self, start: Start) -> None:
        async with chatting(start, "The same words.", flags=("--history-max-bytes", "4000")) as chat:
            first = await chat.post(messages=[user("a")], session_id="one", **ASK)
            for name in ("two", "three", "four"):
                await chat.post(messages=[user("a")], session_id=name, **ASK)
            history = [user("a"), said(first), user("b")]
            assert (await chat.post(messages=history, session_id="one", **ASK))["history"] == "fresh"

    async def test_a_session_may_fork_from_another_one_as_often_as_it_likes(self, start: Start) -> None:
        async with chatting(start, "Root.", "More.") as chat:
            root = await chat.post(messages=[user("a")], session_id="main", **ASK)
            for question in "bcd":
                history = [user("a"), said(root), user(question)]
                assert is_continued(await chat.post(messages=history, session_id="sub", **ASK), root)


class TestEnds:
    async def test_a_stop_string_that_the_end_of_a_turn_begins_with_does_not_tear_it(
        self, start: Start
    ) -> None:
        async with chatting(start, "One < two.", "Two.", family=QWEN2_5) as chat:
            first = await chat.post(messages=[user("a")], stop=["<"], **ASK)
            second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
            assert is_continued(second, first)
            behind = second["prompt_token_ids"][
                len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"]) :
            ]
            assert chat.read(behind[:1]) == "<|im_end|>"

    @pytest.mark.parametrize(
        ("family", "end", "behind"),
        [(LLAMA, "<|eom_id|>", "<|start_header_id|>"), (QWEN2_5, "<|endoftext|>", "\n<|im_start|>")],
        ids=["llama", "qwen"],
    )
    async def test_a_turn_that_ended_otherwise_is_not_ended_twice(
        self, start: Start, family: Any, end: str, behind: str
    ) -> None:
        async with chatting(start, f"One.{end}", "Two.", family=family) as chat:
            first = await chat.post(messages=[user("a")], **ASK)
            assert chat.read(first["choices"][0]["token_ids"]).endswith(end)
            second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
            assert is_continued(second, first)
            known = len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"])
            assert chat.read(second["prompt_token_ids"][known:]).startswith(behind)

    async def test_a_stop_token_of_the_clients_is_no_end_of_a_turn(self, start: Start) -> None:
        async with chatting(start, "One.<|endoftext|>", "Two.", family=QWEN2_5) as chat:
            (token,) = chat.family.tokenizer.encode("<|endoftext|>")
            first = await chat.post(messages=[user("a")], stop_token_ids=[token], **ASK)
            second = await chat.post(messages=[user("a"), said(first), user("b")], **ASK)
            known = len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"])
            assert chat.read(second["prompt_token_ids"][known:]).startswith("<|im_end|>\n")

    async def test_visible_part_of_a_stop_string_is_continued(self, start: Start) -> None:
        async with chatting(start, "One two</stop>", " more.", family=QWEN2_5) as chat:
            for trim in (False, True):
                body = {**ASK, "stop": ["</stop>"], "no_stop_trim": not trim, "session_id": f"s{trim}"}
                first = await chat.post(messages=[user(f"a{trim}")], **body)
                begun = [user(f"a{trim}"), said(first)]
                second = await chat.post(messages=begun, continue_final_message=True, **ASK)
                assert chat.read(second["prompt_token_ids"]).endswith(said(first)["content"])

    async def test_an_answer_that_goes_on_behind_stripped_words_is_no_thought(self, start: Start) -> None:
        flags = ("--reasoning-parser", "deepseek-r1")
        async with chatting(start, " two three.", family=QWEN2_5, flags=flags) as chat:
            begun = [user("a"), {"role": "assistant", "content": "<think>hm</think>One "}]
            document = await chat.post(messages=begun, continue_final_message=True, **ASK)
            assert document["choices"][0]["message"]["content"].strip() == "two three."


def test_evicted_parent_is_counted_again_with_its_continuations() -> None:
    history, size = History(20_000, set()), 1_000

    def a_turn(parent: Turn | None, number: int) -> Turn:
        reply = Message("assistant", "")
        key = number.to_bytes(16, "big")
        return Turn(parent, key, 1, "s", b"x" * size, b"", reply, "", "", 0, False, b"", b"")

    agents = [a_turn(None, number) for number in range(20)]
    for step in range(20):
        agents = [a_turn(agent, 100 * step + number) for number, agent in enumerate(agents)]
        for agent in agents:
            history.add(agent)
            reachable = {one for turn in history._used for one in turn.chain()}
            counted = sum(turn.size_bytes for turn in history._used)
            assert history.size_bytes == counted
            assert len(reachable) * size <= 20_000 + len(agents) * 25 * size


def test_session_may_continue_earlier_turns_unless_it_lost_some() -> None:
    def a_turn(parent: Turn | None, key: bytes) -> Turn:
        reply = Message("assistant", "")
        return Turn(parent, key, 1, "main", b"", b"", reply, "", "", 0, False, key + b" asked", b"")

    history = History(0, set())
    first = a_turn(None, b"first")
    history.add(a_turn(a_turn(first, b"second"), b"third"))
    history.asking("sub", b"place").continues_from(history._turns[b"third"][0])
    asked = [b"first", b"place"], b"question", "sub", lambda first, last: b""
    [found] = history.find(*asked)
    assert (found.turns, found.needs_check) == ([first], False)
    history.lose("sub")
    assert not list(history.find(*asked))


def test_size_of_a_turn_is_constant_when_its_answer_is_written() -> None:
    """CPython keeps the UTF-8 of a string that was written as JSON: what goes must count as what came."""
    history = History(20_000, set())
    for number in range(100):
        reply = Message("assistant", f"日本語{number}" * 100, reasoning=f"größer{number}" * 50)
        key = number.to_bytes(16, "big")
        history.add(Turn(None, key, 1, None, b"", b"", reply, "text", "", 0, False, b"", b""))
        orjson.dumps([reply.content, reply.reasoning])
        assert history.size_bytes == sum(turn.size_bytes for turn in history._used)
    assert 1 <= len(history) < 20


@pytest.mark.parametrize(
    "text", ["", "plain" * 99, "ö" * 500, "日" * 500, "😀", "😀" * 500, "a" * 500 + "😀"]
)
def test_size_of_a_turn_covers_its_text_of_any_characters(text: str) -> None:
    def a_turn(content: str) -> Turn:
        return Turn(None, b"", 1, None, b"", b"", Message("assistant", content), "", "", 0, False, b"", b"")

    orjson.dumps(text)
    assert a_turn(text).size_bytes - a_turn("").size_bytes >= sys.getsizeof(text) - sys.getsizeof("")


@pytest.mark.parametrize(
    "answer",
    [
        {"meta_info": None},
        {"meta_info": {"finish_reason": {"type": "stop"}}, "text": 5},
        {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [5]}, "text": "a"},
        {"meta_info": {"finish_reason": {"type": "stop"}}, "text": "a", "output_ids": [2**40]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_nonsense_of_a_worker_is_its_fault(
    start: Start, answer: dict[str, Any], stream: bool, path: str
) -> None:
    engine = FakeEngine()
    engine.events_sent = 1
    engine.rest = lambda _: answer
    async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
        await chat.replace_engine(url)
        asked: dict[str, Any] = {"messages": [user("a")]} if "chat" in path else {"prompt": "a"}
        answered = await chat.running.client.post(path, json={**asked, "stream": stream})
        assert answered.status_code in (200, 502)
        assert b"PLUGIN_FAILED" not in answered.content
        if stream:
            assert answered.content.endswith(b"data: [DONE]\n\n")
        assert not any(one.in_flight for one in chat.running.router.pool)
