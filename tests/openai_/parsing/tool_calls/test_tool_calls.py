"""Each family's tool calls, and the result of parsing them; ``test_parser.py`` has the rules for all."""

from __future__ import annotations

import json
import re

import pytest

from openai_.parsing.answers import TOOLS, WRITTEN, Call, calls_of, read, tools, written
from slime_openai.parsing.deltas import Delta, message
from slime_openai.parsing.parser import Parser
from slime_openai.parsing.tool_calls import CALL_FORMATS, FORCED_CALLS, CallFormat, choose_calls
from slime_openai.requests.tools import Tools

SEARCH: Call = ("search", '{"q": "tags </tool_call> [TOOL_CALLS] <｜tool▁call▁end｜> {[\\"\\\\"}')
SEVERAL: tuple[Call, ...] = (SEARCH, ("store", '{"text": "\\u00e9 \U0001f914"}'), ("search", "{}"))


def told(family: str | CallFormat, text: str, *, parallel: bool = True) -> tuple[str | None, list[Call]]:
    """Content and calls, which are the same for the whole text and for each of its characters."""
    whole = message(read(family, text, parallel=parallel))
    assert whole == message(read(family, *text, parallel=parallel))
    return whole.content, calls_of(whole)


JSON_FAMILIES = [each for each in WRITTEN if each != "qwen3_coder"]
TAGGED = [each for each in WRITTEN if each != "llama3"]


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_several_calls_come_out_as_the_model_wrote_them(family: str) -> None:
    assert told(family, written(family, *SEVERAL)) == (None, list(SEVERAL))


@pytest.mark.parametrize("family", TAGGED)
def test_text_may_stand_before_and_behind_calls(family: str) -> None:
    text = written(family, ("search", "{}"), ("store", '{"text": "a"}'))
    content, calls = told(family, f"Let me see.\n\n{text}\nThat is all.\n")
    assert content == "Let me see.\nThat is all.\n"
    assert calls == [("search", "{}"), ("store", '{"text": "a"}')]


@pytest.mark.parametrize("family", list(WRITTEN))
def test_without_tools_to_call_the_text_is_content(family: str) -> None:
    text = f"Hello.\n{written(family, *SEVERAL)}\n"
    for nothing in (Tools(), Tools(TOOLS.shown, "none")):
        assert message(read(family, *text, tools=nothing)).content == text


@pytest.mark.parametrize("family", list(WRITTEN))
def test_a_call_of_an_unknown_tool_is_content(family: str) -> None:
    text = written(family, ("nobody", '{"text": "a"}'))
    assert told(family, text) == (text, [])


@pytest.mark.parametrize("family", list(WRITTEN))
def test_a_call_within_the_call_of_an_unknown_tool_is_content(family: str) -> None:
    inner = written(family, ("search", "{}"))
    text = written(family, ("nobody", json.dumps({"text": inner}, ensure_ascii=False)))
    assert told(family, text) == (text, [])


@pytest.mark.parametrize("family", list(WRITTEN))
def test_known_and_unknown_tools_may_be_called_in_one_answer(family: str) -> None:
    content, calls = told(
        family, written(family, ("search", "{}"), ("nobody", '{"text": "a"}'), ("store", "{}"))
    )
    assert calls == [("search", "{}"), ("store", "{}")]
    assert content is not None
    assert "nobody" in content


@pytest.mark.parametrize("family", list(WRITTEN))
def test_without_parallel_calls_only_the_first_is_one(family: str) -> None:
    content, calls = told(family, written(family, ("search", "{}"), ("store", "{}")), parallel=False)
    assert calls == [("search", "{}")]
    assert content is not None
    assert "store" in content


@pytest.mark.parametrize("family", list(WRITTEN))
@pytest.mark.parametrize("before", ["", "Hello "])
def test_a_call_that_is_cut_before_its_arguments_is_content(family: str, before: str) -> None:
    if family == "llama3":
        before = ""
    text = before + written(family, ("search", '{"q":1}'))
    ends = [begin.start() for begin in re.finditer(r'\{"q"|<parameter=', text)]
    for end in range(ends[0] + 1):
        assert told(family, text[:end]) == (text[:end], [])


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_cut_tool_call_has_the_arguments_that_came(family: str) -> None:
    text = written(family, ("search", '{"q": "Hello, world"}'))
    assert told(family, text[: text.index(", world")]) == (None, [("search", '{"q": "Hello')])


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_arguments_that_are_no_json_are_the_call_s(family: str) -> None:
    arguments = '{"q": \'single\', "n": [1,,]}'
    assert told(family, written(family, ("search", arguments))) == (None, [("search", arguments)])


@pytest.mark.parametrize("family", ["hermes", "deepseekv3", "deepseekv31", "mistral, named"])
@pytest.mark.parametrize("open_", ['{"q": 1', '{"q": "a\n', '{"q": "a\n\\"', '{"q": [{"a": "b"}'])
def test_arguments_that_are_not_closed_do_not_swallow_the_next_call(family: str, open_: str) -> None:
    content, calls = told(family, written(family, ("search", open_), ("store", "{}")))
    assert content is None
    assert [name for name, _ in calls] == ["search", "store"]
    assert calls[0][1].startswith(open_)
    assert calls[1] == ("store", "{}")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "search", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {q: 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"q": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"q": tru}, "name": "search"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"q": 1'),
        ("hermes", '<tool_call>{"name": "sea\\x", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{}</tool_call> and </tool_call>"),
        ("hermes", "Use <tool_call> to call."),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "Ada", "born": 1815}'),
        ("llama3", '{"type": "poem"}'),
        ("llama3", "{"),
        ("llama3", 'Here: {"name": "search", "parameters": {}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="weather")'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[TOOL_CALLS] ["search"]'),
        ("mistral", "[TOOL_CALLS]search{}"),
        ("mistral", "[TOOL_CALLS]search[CALL_ID]a b[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]search[ARGS][]"),
        ("deepseekv3", "<｜tool▁calls▁begin｜> nothing <｜tool▁calls▁end｜>"),
        ("deepseekv3", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("deepseekv31", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>none<｜tool▁call▁end｜>"),
        ("qwen3_coder", "<tool_call>\nsearch\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=search>\nq=1\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=>\n</function>"),
        ("qwen3_coder", "<function=nobody>\n<parameter=a>\n1\n</function> "),
        ("qwen3_coder", "<function=nobody>\n<parameter=a>\n1"),
    ],
)  # fmt: skip
def test_invalid_call_is_content(family: str, text: str) -> None:
    assert told(family, text) == (text, [])


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        # Hermes 2 Pro, whose prompt has the arguments first
        ("hermes", '<tool_call>{"arguments": {"q": 1}, "name": "search"}</tool_call>', None, [("search", '{"q": 1}')]),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>', None, [("search", "{}")]),
        (
            "hermes",
            '<tool_call>{"id": 7, "a": [{"b": null}], "name": "search", "arguments": {}, "c": "}"}</tool_call>',
            None,
            [("search", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "search", "arguments": {}</tool_call>So.', "So.", [("search", "{}")]),
        ("hermes", '<tool_call>{"name": "search", "arguments": {}}', None, [("search", "{}")]),
        ("hermes", '<tool_call>{"name": "search", "arguments": {}}\nSo.', "\nSo.", [("search", "{}")]),
        ("hermes", '<tool_call><tool_call>{"name": "search"}</tool_call>', "<tool_call>", [("search", "{}")]),
        (
            "hermes",
            '<tool_call>{]</tool_call><tool_call>{"name": "search", "arguments": {}}</tool_call>',
            "<tool_call>{]</tool_call>",
            [("search", "{}")],
        ),
        ("llama3", '{"type": "function", "name": "search", "parameters": {"q": 1}}', None, [("search", '{"q": 1}')]),
        ("llama3", '\n{"name": "search"}\n{"name": "store"}', None, [("search", "{}"), ("store", "{}")]),
        ("llama3", 'So:<|python_tag|>{"name": "search", "parameters": {}}', "So:", [("search", "{}")]),
        ("llama3", '{"name": "search", "parameters": {}}; {"a": 1}', '; {"a": 1}', [("search", "{}")]),
        # Tekken tokenizers write no space; the model may add an id
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {}, "id": "a1b2c3d4e"}]', None, [("search", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {}}, {"b": 1}]', ', {"b": 1}]', [("search", "{}")]),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS]{"q": 1}', None, [("search", '{"q": 1}')]),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"q": [1, [2]]} So.', " So.", [("search", '{"q": [1, [2]]}')]),
        # no section around the call, and the fence left open
        (
            "deepseekv3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{}\n<｜tool▁call▁end｜>",
            None,
            [("search", "{}")],
        ),
        (
            "deepseekv31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>?",
            "<｜tool▁call▁begin｜>?",
            [("search", "{}")],
        ),
    ],
)  # fmt: skip
def test_calls_are_found_in_what_models_write_besides(
    family: str, text: str, content: str | None, calls: list[Call]
) -> None:
    assert told(family, text) == (content, calls)


def test_an_answer_in_json_that_is_no_call_does_not_wait_for_its_end() -> None:
    parser = Parser(calls=CALL_FORMATS["llama3"], tools=TOOLS)
    assert message(parser.feed('{"answer": "The first of')).content == '{"answer": "The first of'


def test_a_stop_string_may_be_the_end_of_a_call() -> None:
    text = written("hermes", ("search", '{"q": 1}'))
    answer = message(read("hermes", *text, stop=["</tool_call>"]))
    assert (answer.content, calls_of(answer)) == (None, [("search", '{"q": 1}')])


def stored(value: str, key: str = "text") -> str:
    return (
        f"<tool_call>\n<function=store>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "line 1\n\tline \"2\"\n", '"line 1\\n\\tline \\"2\\"\\n"'),
        ("text", "", '""'),
        ("text", "42", '"42"'),
        ("text", "NULL", "null"),
        ("text", "nullable", '"nullable"'),
        ("text", "null\n", '"null\\n"'),
        ("text", "<b>\\n</parameters>", '"<b>\\\\n</parameters>"'),
        ("count", "42", "42"),
        ("count", " -7 ", "-7"),
        ("count", "12345678901234567890123", '"12345678901234567890123"'),
        ("count", "4.5", '"4.5"'),
        ("count", "true", '"true"'),
        ("count", "many", '"many"'),
        ("share", "4.50", "4.50"),
        ("share", "1e3", "1e3"),
        ("share", "3", "3"),
        ("share", "NaN", '"NaN"'),
        ("again", "True", "true"),
        ("again", "false", "false"),
        ("again", "1", '"1"'),
        ("items", '[1, {"a": [2]}]', '[1, {"a": [2]}]'),
        ("items", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("more", '{"b": 1,\n "a": "é"}', '{"b": 1,\n "a": "é"}'),
        ("more", "{'a': 1}", "\"{'a': 1}\""),
        ("limit", "5", "5"),
        ("limit", "null", "null"),
        ("label", "5", '"5"'),
        ("label", "null", "null"),
        ("either", "5", "5"),
        ("either", "five", '"five"'),
        ("odd", "5", '"5"'),
        ("unknown", "5", '"5"'),
    ],
)  # fmt: skip
def test_bare_values_become_json_as_the_schema_has_it(key: str, value: str, expected: str) -> None:
    assert told("qwen3_coder", stored(value, key)) == (None, [("store", f'{{"{key}": {expected}}}')])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (
            "<function=store>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
            None,
            '{"text": "a"}',
        ),
        ("<function=store><parameter=text>a</parameter></function>", None, '{"text": "a"}'),
        (
            "<function=store>\n<parameter=text>\na\n<parameter=count>\n1\n</function>",
            None,
            '{"text": "a", "count": 1}',
        ),
        ("<function=store>\n<parameter=count>\n1\n</parameter>\n</tool_call>So.", "So.", '{"count": 1}'),
        (
            "<function=store>\n<parameter=count>\n1\n</parameter> or\n</function>",
            " or\n</function>",
            '{"count": 1}',
        ),
        # cut: nobody knows what was to follow
        ("<function=store>\n<parameter=text>\na\n", None, '{"text": "a\\n'),
        ("<function=store>\n<parameter=text>\nnu", None, '{"text": "nu'),
        ("<function=store>\n<parameter=text>\n", None, '{"text": '),
        ("<function=store>\n<parameter=count>\n12", None, '{"count": 12'),
        ("<function=store>\n<parameter=count>\n1\n</parameter>\n", None, '{"count": 1'),
        ("<function=store>\n<parameter=count>\n1\n</parameter>\n<para", "\n<para", '{"count": 1'),
    ],
)
def test_tags_of_parameters_may_be_missing(text: str, content: str | None, arguments: str) -> None:
    assert told("qwen3_coder", text) == (content, [("store", arguments)])


def test_two_functions_may_share_a_tag() -> None:
    text = "<tool_call>\n<function=search>\n</function>\n<function=store>\n</function>\n</tool_call>"
    assert told("qwen3_coder", text) == (None, [("search", "{}"), ("store", "{}")])


@pytest.mark.parametrize("schema", [None, {"properties": ["text"]}, {"properties": {"text": True}}])
def test_without_a_schema_that_says_more_values_are_strings(schema: dict[str, object] | None) -> None:
    function = {"name": "store", "parameters": schema}
    asked = Tools(({"type": "function", "function": function},), "auto", frozenset(("store",)))
    assert calls_of(read("qwen3_coder", stored("5"), tools=asked)) == [("store", '{"text": "5"}')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "search", "parameters": {"q": 1}}]', None, [("search", '{"q": 1}')]),
        (' [{"name": "search"},\n {"name": "store"}]\n', None, [("search", "{}"), ("store", "{}")]),
        ('[{"name": "search", "parameters": {"q"', None, [("search", '{"q"')]),
        ('[{"name": "sea', '[{"name": "sea', []),
        ("No.", "No.", []),
    ],
)  # fmt: skip
def test_forced_calls_are_a_list(text: str, content: str | None, calls: list[Call]) -> None:
    assert told(FORCED_CALLS, text) == (content, calls)


def test_only_the_tools_that_may_be_called_are_called() -> None:
    shown = tools(search=None, store=None).shown
    only = Tools(shown, "auto", frozenset(("store",)))
    text = written("hermes", ("search", "{}"), ("store", "{}"))
    assert calls_of(read("hermes", text, tools=only)) == [("store", "{}")]


def test_ids_of_mistral_are_what_its_templates_accept() -> None:
    parser = Parser(calls=CALL_FORMATS["mistral"], tools=TOOLS)
    deltas: list[Delta] = parser.feed(written("mistral", ("search", "{}"), ("store", "{}")))
    ids = [call.id or "" for call in message(deltas).tool_calls]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)


def test_ids_of_others_are_openai_s() -> None:
    parser = Parser(calls=CALL_FORMATS["hermes"], tools=TOOLS)
    (call,) = message(parser.feed(written("hermes", ("search", "{}")))).tool_calls
    assert re.fullmatch("call_[0-9a-f]{24}", call.id or "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}", None),
        ('{{ \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}', "qwen25"),
        (
            "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}{{ '<parameter=' + key + '>\\n' }}",
            "qwen3_coder",
        ),
        ("{{ '<tool_call>' + call.name }}{{ '<arg_key>' + key + '</arg_key>' }}", None),
        ("{{ '<minimax:tool_call>\\n<invoke name=\"' }}", None),
        ("{{ '<|start_header_id|>assistant<|end_header_id|>' }}{{ '\"parameters\": ' }}", "llama3"),
        ("{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' }}", None),
        ("{{ '[TOOL_CALLS] [' + calls | tojson + ']' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}", "mistral"),
        (
            "{{ '<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n' + arguments }}",
            "deepseekv3",
        ),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
            "deepseekv31",
        ),
    ],
)
def test_the_chat_template_tells_how_a_model_calls(template: str, name: str | None) -> None:
    found = choose_calls(template)
    assert (found and found.name) == name
