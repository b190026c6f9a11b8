"""Random answers of models, split anywhere by the engine: the same answer comes out, and nothing of it is lost.

The suite reads some thousand answers. To read 5,000 for each property and family::

    SLIME_ROUTER_ANSWERS=5000 pytest tests/openai_/parsing/test_parser.py
"""

from __future__ import annotations

import os
import re
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openai_.parsing.answers import TOOLS, WRITTEN, calls_of, cut, read, written
from slime_openai.parsing.deltas import Arguments, CallStart, Content, Delta, Reasoning, message
from slime_openai.parsing.parser import Parser
from slime_openai.parsing.reasoning import REASONING_FORMATS
from slime_openai.parsing.tool_calls import CALL_FORMATS, FORCED_CALLS
from slime_openai.requests.tools import Tools

ANSWERS = settings(max_examples=int(os.environ.get("SLIME_ROUTER_ANSWERS", "40")), deadline=None)
FAMILIES = list(WRITTEN)
QWEN3 = REASONING_FORMATS["qwen3"]
CUTS = st.lists(st.integers(0, 300), max_size=12)

#: Texts that formats have tags for, and texts that break them.
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "```json\n", "\n```", "function", "<function=", "<function=store>", "<parameter=text>", "</parameter>",
    "</function>", "search", "store", "nobody", ">", "{", "}", "[", "]", ",", ";", ":", '"', "\\", '"name"',
    '"arguments"', '"parameters"', '"type": "function", ', '{"name": "search", ', '"arguments": ', '"parameters": ',
    '{"text": "', "null", "\\u00e9", "\\ud83e\\udd14", "\U0001f914", "é", " ", "\n", "\t", "a", "Hello", "##", "#",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8), st.sampled_from(FRAGMENTS)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4) | st.sampled_from(FRAGMENTS), JSON, max_size=3)
TEXTS = st.text("abc é\U0001f914.\n", max_size=12)


def dumped(value: Any, *, indented: bool) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if indented else 0).decode()


#: Calls that went wrong: truncated at any place, a name that nobody has, one more or one less of anything.
@st.composite
def broken(draw: st.DrawFn, family: str) -> str:
    name = draw(st.sampled_from(["search", "store", "nobody"]))
    text = written(family, (name, dumped(draw(OBJECTS), indented=False)))
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, len(text)))
    return text[:begin] + draw(st.sampled_from(["", *FRAGMENTS])) + text[end:]


def good(family: str) -> st.SearchStrategy[str]:
    calls = st.tuples(
        st.sampled_from(["search", "store"]), OBJECTS.map(lambda value: dumped(value, indented=False))
    )
    return st.lists(calls, min_size=1, max_size=2).map(lambda each: written(family, *each))


def anything(family: str) -> st.SearchStrategy[str]:
    part = st.one_of(good(family), broken(family), st.sampled_from(FRAGMENTS), TEXTS)
    return st.lists(part, max_size=8).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), cuts=CUTS, think=st.booleans(), stop=st.lists(st.sampled_from(FRAGMENTS), max_size=2))
@ANSWERS
def test_the_stream_equals_the_whole_however_the_text_is_split(
    family: str, data: st.DataObject, cuts: list[int], think: bool, stop: list[str]
) -> None:
    text = data.draw(anything(family))
    reasoning = QWEN3 if think else None
    whole = read(family, text, reasoning=reasoning, stop=stop)
    for pieces in (cut(text, cuts), list(text)):
        assert message(read(family, *pieces, reasoning=reasoning, stop=stop)) == message(whole)


#: Parts that may be missing of a text: white space, tags, and what stands around the arguments in the JSON of a call.
FRAME = [
    re.compile(each)
    for each in (
        r"\s", "</?think>", "</?tool_call>", r"<\|python_tag\|>", r"\[TOOL_CALLS\]", r"\[ARGS\]", r"\[CALL_ID\][\w.-]*",
        "<｜tool▁calls?▁(begin|end)｜>", "<｜tool▁sep｜>", "```(json)?", "function", "search", "store",
        r"[\[\]{},;:]", r'"([^"\\]|\\.)*"', r"null|true|false|-?\d+",
    )
]  # fmt: skip


def behind_frames(text: str, begin: set[int]) -> set[int]:
    """Return the positions in ``text`` behind any number of frames."""
    reached, new = set(begin), set(begin)
    while new:
        new = {found.end() for at in new for frame in FRAME if (found := frame.match(text, at))} - reached
        reached |= new
    return reached


def told(deltas: list[Delta]) -> list[str]:
    """The texts in ``deltas``, and for calls without arguments, which need not be in the model's text, nothing."""
    arguments = [each for _, each in calls_of(deltas)]
    texts = []
    for delta in deltas:
        if isinstance(delta, Content | Reasoning):
            texts.append(delta.text)
        elif isinstance(delta, CallStart) and arguments[delta.index] != "{}":
            texts.append(arguments[delta.index])
    return texts


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "qwen3_coder"])
@given(data=st.data(), think=st.booleans())
@ANSWERS
def test_nothing_but_the_frames_of_calls_is_missing(family: str, data: st.DataObject, think: bool) -> None:
    text = data.draw(anything(family))
    deltas = read(family, text, reasoning=QWEN3 if think else None)
    places = {0}
    for part in told(deltas):
        places = {at + len(part) for at in behind_frames(text, places) if text.startswith(part, at)}
        assert places, f"{part!r} does not follow"
    assert len(text) in behind_frames(text, places), "text is missing at the end"
    if not think and not calls_of(deltas):
        assert message(deltas).content == text


@given(text=anything("hermes"), cuts=CUTS)
@ANSWERS
def test_without_tools_everything_is_content_at_once(text: str, cuts: list[int]) -> None:
    for tools in (Tools(), Tools(TOOLS.shown, "none")):
        parser = Parser(calls=CALL_FORMATS["hermes"], tools=tools)
        for piece in cut(text, cuts):
            assert parser.feed(piece) == [Content(piece)]
        assert parser.finish() == []


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "qwen3_coder"])
@given(
    before=TEXTS,
    after=TEXTS,
    objects=st.lists(OBJECTS, min_size=1, max_size=3),
    indented=st.booleans(),
    cuts=CUTS,
)
@ANSWERS
def test_the_arguments_of_well_formed_calls_are_the_model_s_json(
    family: str, before: str, after: str, objects: list[Any], indented: bool, cuts: list[int]
) -> None:
    calls = [("store", dumped(each, indented=indented)) for each in objects]
    if family == "llama3":
        before = "<|python_tag|>" if before.strip() else ""
    text = before + written(family, *calls) + after
    answer = message(read(family, *cut(text, cuts)))
    assert calls_of(answer) == calls
    before = before.rstrip().removesuffix("<|python_tag|>")
    assert (answer.content or "") == before + (after if after.strip() else "")
    assert [call.id for call in answer.tool_calls] == [f"call_{n}" for n in range(len(calls))]


BARE = st.text('abc é"\\{}<>\U0001f914\n', max_size=8).map(lambda text: f"a{text}a")
STORED = st.fixed_dictionaries(
    {},
    optional={
        "text": BARE,
        "count": st.integers(-(2**53), 2**53),
        "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "again": st.booleans(),
        "items": st.lists(BARE | st.integers(0, 9), max_size=3),
        "more": st.dictionaries(BARE, BARE, max_size=2),
        "limit": st.none() | st.integers(0, 9),
        "label": st.none() | BARE,
        "either": st.integers(0, 9) | BARE,
        "unknown": BARE,
    },
)


@given(before=TEXTS, after=TEXTS, objects=st.lists(STORED, min_size=1, max_size=3), cuts=CUTS)
@ANSWERS
def test_parameters_that_are_written_bare_become_the_json_of_their_schema(
    before: str, after: str, objects: list[Any], cuts: list[int]
) -> None:
    text = (
        before
        + written("qwen3_coder", *(("store", dumped(each, indented=False)) for each in objects))
        + after
    )
    answer = message(read("qwen3_coder", *cut(text, cuts)))
    assert [orjson.loads(arguments) for _, arguments in calls_of(answer)] == objects
    assert (answer.content or "") == before.rstrip() + (after if after.strip() else "")


@given(objects=st.lists(OBJECTS, min_size=1, max_size=3), cuts=CUTS)
@ANSWERS
def test_a_forced_answer_is_a_list_of_calls(objects: list[Any], cuts: list[int]) -> None:
    calls = [("store", dumped(each, indented=False)) for each in objects]
    text = f"[{', '.join(written('llama3', call) for call in calls)}]"
    answer = message(read(FORCED_CALLS, *cut(text, cuts)))
    assert (calls_of(answer), answer.content) == (calls, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_come_as_the_model_writes_them(family: str) -> None:
    text = written(family, ("store", '{"text":"Hello, world"}'))
    until = text.index("world")
    parser = Parser(calls=CALL_FORMATS[WRITTEN[family][0]], tools=TOOLS)
    said = "".join(
        delta.text
        for character in text[:until]
        for delta in parser.feed(character)
        if isinstance(delta, Arguments)
    )
    assert said.replace(": ", ":") == '{"text":"Hello, '


@pytest.mark.parametrize("family", FAMILIES)
def test_a_piece_of_the_stream_is_one_delta_of_a_kind(family: str) -> None:
    text = "Hello <b>.\n" * (family != "llama3") + written(
        family, ("store", '{"text": "<>"}'), ("search", "{}")
    )
    kinds = [type(delta) for delta in read(family, text)]
    assert kinds == [Content] * (family != "llama3") + [CallStart, Arguments] * 2


def test_each_answer_has_a_parser_of_its_own() -> None:
    first, second = (Parser(calls=CALL_FORMATS["hermes"], tools=TOOLS) for _ in range(2))
    assert first.feed("<tool_call>") == []
    assert second.feed("Hello") == [Content("Hello")]
    assert first.finish() == [Content("<tool_call>")]
    assert second.finish() == []


def test_whether_a_call_came_out_is_known() -> None:
    parser = Parser(calls=CALL_FORMATS["hermes"], tools=TOOLS)
    parser.feed('<tool_call>{"name": "search", ')
    assert not parser.called
    parser.feed('"arguments": {}}</tool_call>')
    assert parser.called


@given(text=anything("hermes"), stop=st.sampled_from(FRAGMENTS), cuts=CUTS)
@example(text="Hello ##", stop="##", cuts=[7])
@ANSWERS
def test_no_stop_string_is_shown(text: str, stop: str, cuts: list[int]) -> None:
    answer = message(read("hermes", *cut(text, cuts), stop=[stop]))
    until = text.partition(stop)[0]
    assert answer == message(read("hermes", until))
