"""A request that begins with known messages is read as if none were known, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_openai.errors import InvalidRequest
from slime_openai.prompts.known_messages import Beginning, KnownMessages, read_question
from slime_openai.prompts.question import Question
from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.chat_request import ChatRequest

USER = {"role": "user", "content": "Hi."}
ANSWER = {"role": "assistant", "content": "Hello."}
FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "c1"}
TRAITS = TemplateTraits(shows_call_ids=False)
ROOM = 1 << 20


def read(known: KnownMessages, body: Any, session: str | None = None) -> tuple[ChatRequest, Question] | str:
    """Read ``body`` as a chat does. Return its error, if there is one."""
    raw = orjson.dumps(body)
    parsed = orjson.loads(raw)
    beginning = known.beginning(parsed, session)
    try:
        request, question, may_be_kept = read_question(parsed, raw, beginning, session, TRAITS)
    except InvalidRequest as error:
        return f"{error.param}: {error}"
    if may_be_kept:
        known.keep(beginning, question)
    return request, question


def beginning(known: KnownMessages, *messages: Any, **more: Any) -> Beginning:
    return known.beginning({"messages": list(messages), **more}, None)


def kept(*messages: Any, room: int = ROOM, **more: Any) -> KnownMessages:
    known = KnownMessages(room)
    assert not isinstance(read(known, {"messages": list(messages), **more}), str)
    return known


#: JSON values that Python may take for equal, although they are of different types.
ALIKE = st.sampled_from(
    [None, True, False, 0, 1, 1.0, 0.0, "", "1", [], {}, [1], [True], {"a": 1}, {"a": True}]
)
CALLS = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["c1", "c2", None, 1]),
        "function": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["f", "g", ""]),
                "arguments": st.sampled_from(["{}", "", {}, {"a": 1}]) | ALIKE,
            }
        ),
    },
    optional={"type": st.sampled_from(["function", "custom"]), "index": ALIKE},
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url"]), "text": st.sampled_from(["a", "b"]) | ALIKE},
    optional={"cache_control": ALIKE},
)
CONTENTS = st.sampled_from(["", "a", "b", " a", "ä"]) | st.none() | st.lists(PARTS, max_size=2) | ALIKE
MESSAGES = st.one_of(
    st.sampled_from([USER, ANSWER, CALLING, RESULT]),
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "function", "other"]),
            "content": CONTENTS,
        },
        optional={
            "name": st.sampled_from(["ann", None]) | ALIKE,
            "tool_call_id": st.sampled_from(["c1", "c2"]) | ALIKE,
            "tool_calls": st.lists(CALLS, max_size=2) | st.none(),
            "reasoning": st.sampled_from(["hm", None]) | ALIKE,
            "reasoning_content": st.sampled_from(["hm", None]),
            "refusal": st.sampled_from(["no", None]),
            "annotations": ALIKE,
            "unknown": ALIKE,
        },
    ),
)
CHANGES: list[Callable[[list[Any], int, Any], list[Any]]] = [
    lambda messages, place, message: [*messages, message],
    lambda messages, place, message: [*messages[:place], message, *messages[place + 1 :]],
    lambda messages, place, message: [*messages[:place], message, *messages[place:]],
    lambda messages, place, message: [*messages[:place], *messages[place + 1 :]],
    lambda messages, place, message: messages[:place],
    lambda messages, place, message: messages,
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(CHANGES),
        st.integers(0, 6),
        MESSAGES,
        st.sampled_from([{}, {}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"n": 0}]),
    ),
    max_size=8,
)


@given(st.lists(MESSAGES, max_size=4), STEPS)
def test_what_is_known_changes_nothing(messages: list[Any], steps: list[Any]) -> None:
    known = KnownMessages(ROOM)
    messages = [USER, ANSWER, *messages]
    for change, place, message, more in [(CHANGES[-1], 0, None, {}), *steps]:
        messages = change(messages, place, message)
        body = {"messages": messages, **more}
        assert read(known, body) == read(KnownMessages(ROOM), body)


def test_messages_of_the_last_turn_are_known() -> None:
    known = kept(USER, ANSWER, USER)
    found = beginning(known, USER, ANSWER, USER, CALLING, RESULT)
    assert (len(found.messages), len(found.keys), found.others) == (3, 4, [CALLING, RESULT])


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, True), (0, False), (1, 1.0), ("1", 1), (None, False), ("", None)],
)
def test_values_of_other_types_are_other_arguments(before: Any, after: Any) -> None:
    """Python takes some of them for equal."""

    def body(value: Any) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": {"a": value}}}
        return {"messages": [USER, {**CALLING, "content": "Hm.", "tool_calls": [call]}]}

    known = KnownMessages(ROOM)
    one, other = read(known, body(before)), read(known, body(after))
    assert not isinstance(one, str)
    assert not isinstance(other, str)
    assert one[0].messages[1].tool_calls != other[0].messages[1].tool_calls
    assert one[1].keys[2] != other[1].keys[2]


@pytest.mark.parametrize("good", [2, 40])
def test_error_names_the_place_behind_known_messages(good: int) -> None:
    messages = [USER, ANSWER] * (good // 2)
    known = kept(*messages)
    bad = {"role": "user", "content": 5}
    assert beginning(known, *messages, bad).others == [bad]
    found = read(known, {"messages": [*messages, bad]})
    assert isinstance(found, str)
    assert found.startswith(f"messages.[{good}].content: ")


def test_other_tools_have_other_keys() -> None:
    known = kept(USER, ANSWER, USER)
    body = {"messages": [USER, ANSWER, USER], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert beginning(known, USER, ANSWER, USER).messages
    found = read(known, body)
    assert found == read(KnownMessages(ROOM), body)


def test_results_belong_to_known_calls() -> None:
    """A result has the key of its call's place, also if the call is known and the result is new."""
    calling = {**CALLING, "tool_calls": [{**CALL, "id": name} for name in ("c1", "c2", "c3")]}
    messages = [USER, ANSWER, USER, calling, RESULT]
    last = {**RESULT, "tool_call_id": "c3"}
    known = kept(*messages)
    assert beginning(known, *messages, last).others == [last]
    body = {"messages": [*messages, last]}
    assert read(known, body) == read(KnownMessages(ROOM), body)


def test_chats_of_other_sessions_are_apart() -> None:
    known = kept(USER, ANSWER, session_id="a")
    assert not beginning(known, USER, ANSWER, session_id="b").messages
    assert not beginning(known, USER, ANSWER, session_id=["a"]).messages
    assert beginning(known, USER, ANSWER, session_id="a").messages


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "user", "content": "x" * (1 << 22)},
        {**ANSWER, "annotations": [{}]},
        {**ANSWER, "annotations": 1},
        {**ANSWER, **{str(name): None for name in range(20)}},
        {"role": "user", "content": [{"type": "text", "text": "x"}] * 40},
        {"role": "user", "content": [{"type": "text", "text": "x", **{str(name): 1 for name in range(40)}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "of": [1]}]},
    ],
    ids=["long", "list", "number", "members", "parts", "names", "inner list"],
)
def test_messages_from_an_unusual_one_on_are_not_kept(odd: Any) -> None:
    known = kept(USER, ANSWER, odd, USER)
    assert len(beginning(known, USER, ANSWER, odd, USER).messages) == 2


def test_chat_without_an_early_answer_is_not_kept() -> None:
    assert not kept(USER).size_bytes
    assert not kept(*[USER] * 9, ANSWER).size_bytes
    assert not kept({**ANSWER, "content": ""}).size_bytes
    assert not kept({"role": "assistant", "tool_calls": []}).size_bytes
    assert not kept({**ANSWER, "content": [{"type": "refusal", "refusal": "no"}]}).size_bytes


def test_first_answer_with_parts_or_calls_names_a_chat() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}
    for answer in (parts, CALLING):
        assert len(beginning(kept(USER, answer), USER, answer).messages) == 2


def test_memory_is_bounded_and_counted() -> None:
    """The least recently used chats go first; a chat that is larger than the limit is not kept."""
    chats = [[USER, {"role": "assistant", "content": f"{number} {'ä' * 100}"}] for number in range(20)]
    one = kept(*chats[0]).size_bytes
    assert one > 800  # ä may take 8 bytes
    known = KnownMessages(5 * one)
    for chat in chats:
        for messages in (chat, chats[0]):
            assert not isinstance(read(known, {"messages": messages}), str)
            assert known.size_bytes <= 5 * one
    assert beginning(known, *chats[0]).messages
    assert beginning(known, *chats[19]).messages
    assert not beginning(known, *chats[1]).messages
    assert not kept(*chats[0], room=one - 1).size_bytes


def test_longer_and_shorter_turns_take_the_place_of_the_last() -> None:
    known = kept(USER, ANSWER)
    small = known.size_bytes
    for count, size in ((9, None), (1, small)):
        read(known, {"messages": [USER, ANSWER] * count})
        assert size in (None, known.size_bytes)
        assert known.size_bytes == kept(*[USER, ANSWER] * count).size_bytes
