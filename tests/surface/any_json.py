"""Bodies that a client may send: any JSON, large ones put together from small pieces, and what is nearly JSON.

A body is drawn as a sentence about it, such as ``{"text": 'Hi', "stop": [1, ...] x 500,000}``, so that hypothesis has
little to do however large it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from surface.description import DOCUMENT, operations
from surface.json_parts import Part, deep, items, member, members_of, plain, string

__all__ = ["LARGEST", "MEANT", "ROUTES", "AnyRequest", "Route", "asked"]

#: Bytes of a body, about.
LARGEST = 1_000_000


_SCALARS = (
    *(
        b"null",
        b"true",
        b"false",
        b"0",
        b"-1",
        b"1",
        b"2",
        b"1e9",
        b"-0.0",
        b"0.5",
        b"1e308",
        b"1e309",
        b"-1e400",
    ),
    *(b"1000000000", b"18446744073709551615", b"18446744073709551616", b"-9223372036854775809", b"9" * 400),
    *(b"NaN", b"Infinity", b"-Infinity", b"01", b"1.", b"'a'", b"undefined", b"", b"\xff"),
    *(
        b'""',
        b'"a"',
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\\u0000"',
        b'"\xed\xa0\x80"',
        b'"\n"',
        b'"\xc3\xa9"',
    ),
    *(b"[]", b"{}", b"[[]]", b"[null]", b"[1]", b'["a"]', b"[[1],[2]]", b'{"a":1}', b"[{}]", b'{"":{}}'),
    *(
        b'"user"',
        b'"required"',
        b'"<|im_end|>"',
        b'{"type":"json_object"}',
        b'{"n":1000000000}',
        b'[{"n":2}]',
    ),
)
_CHARACTERS = (
    *(b"a", b" ", b"a b ", b"\\u00e9", b"\xf0\x9f\x98\x80", b"\\ud83d\\ude00", b"\\n", b"0", b"\xe2\x80\xa8"),
    *(b"<|im_end|>", b"<|im_start|>user\\nHi<|im_end|>\\n", b"<think>", b"<tool_call>", b'\\"', b"\xcc\x81"),
)
_ITEMS = (
    *(
        b"1",
        b"-1",
        b"12345",
        b"1.5",
        b"null",
        b"true",
        b'"a"',
        b'""',
        b'"a sample"',
        b"[]",
        b"{}",
        b"[1]",
        b"[[1]]",
    ),
    *(b'["a"]', b'{"a":1}', b'{"role":"user","content":"a"}', b'{"role":"assistant","content":"a"}'),
    *(
        b'{"type":"text","text":"a"}',
        b'{"type":"function","function":{"name":"f"}}',
        b'{"n":1}',
        b"[1,2,3,4,5,6,7,8]",
    ),
    *(b'{"function":{"name":"f","arguments":"{}"}}', b'{"role":"tool","content":"a","tool_call_id":"a"}'),
)
_NAMES = (b"a", b"%d", b"text", b"rid", b"session_id", b"n" * 5000, b"\\u0074ext", b"\\ud800", b"", b"key %d")

_sizes = st.sampled_from((1, 2, 30, 1_000, 60_000, 300_000, LARGEST))
_scalars = st.sampled_from(_SCALARS).map(plain)


def _fitting(size: int, piece: bytes) -> int:
    return max(1, size // (len(piece) + 1))


_strings = st.builds(
    lambda piece, size: string(piece, _fitting(size, piece)), st.sampled_from(_CHARACTERS), _sizes
)
_lists = st.builds(lambda piece, size: items(piece, _fitting(size, piece)), st.sampled_from(_ITEMS), _sizes)
_objects = st.builds(
    lambda name, size: member(name, _fitting(size, name + b'"":1')), st.sampled_from(_NAMES), _sizes
)
_nested = st.builds(
    lambda kind, depth: deep(kind[0], min(depth, LARGEST // len(b"".join(kind))), kind[1]),
    st.sampled_from(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b""), (b'[{"content":', b"}]"))),
    st.sampled_from((2, 100, 253, 254, 255, 900, 1023, 1024, 1025, 100_000, LARGEST)),
)
_numbers = st.builds(lambda size: Part(f"9 x {size:,}", b"", b"9", size), _sizes)
_rows = st.builds(
    lambda row, piece: Part(
        f"[{items(piece, row)}, ...]",
        b"[",
        items(piece, row).data,
        _fitting(LARGEST, items(piece, row).data),
        b",",
        b"]",
    ),
    st.sampled_from((2, 100, 10_000)),
    st.sampled_from((b"1", b'"a"', b"[]")),
)
_VALUES = st.one_of(_scalars, _scalars, _strings, _lists, _objects, _nested, _numbers, _rows)


_USER = b'[{"role":"user","content":"Hi"}]'
_SAMPLING = b'{"max_new_tokens":1}'
#: Items of these fields, where they are large lists and mean something.
MEANT: Mapping[str, Sequence[bytes]] = {
    "text": (b'"a"', b'"a sample"', b'"<|im_start|>user\\nHi<|im_end|>\\n"'),
    "input_ids": (b"1", b"12345", b"[1]", b"[5,6,7]", b"99999999999"),
    "prompt": (b"1", b"12345", b"[1]", b'"a"'),
    "sampling_params": (_SAMPLING, b"{}"),
    "rid": (b'"a"', b'"r1"'),
    "messages": (
        *(
            _USER[1:-1],
            b'{"role":"assistant","content":"a"}',
            b'{"role":"tool","content":"a","tool_call_id":"a"}',
        ),
        b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}]}',
        b'{"role":"user","content":"a"},{"role":"assistant","content":"<think>b</think>c"}',
        b'{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}',
    ),
    "tools": (b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}',),
    "stop": (b'"a"', b'"<|im_end|>"'),
    "stop_token_ids": (b"1",),
    "lora_path": (b'"a"', b"null"),
    "workers": (b'"http://127.0.0.1:1"', b"{}"),
    "labels": (b'"a"',),
}


@dataclass(frozen=True)
class Route:
    """A route that takes a body; ``least`` is one that it accepts, and ``fields`` all names that may stand in it."""

    method: str
    path: str
    least: tuple[tuple[str, bytes], ...]
    fields: tuple[str, ...]


_LEAST: Mapping[str, Sequence[tuple[str, bytes]]] = {
    "/generate": (("text", b'"Hi"'), ("sampling_params", _SAMPLING)),
    "/v1/chat/completions": (("messages", _USER), ("max_tokens", b"1")),
    "/v1/completions": (("prompt", b'"Hi"'), ("max_tokens", b"1")),
    "/retrieve_from_text": (("text", b'"Hi"'),),
    "/retrieve_from_messages_template": (("messages", _USER),),
    "/abort_request": (("rid", b'"a"'),),
}
#: Requests to a worker beside those that the description tells of.
_PROXIED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("POST", "/generate"): (
        *("text", "input_ids", "sampling_params", "rid", "session_id", "model", "stream", "lora_path", "n"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_routed_experts", "image_data"),
        *("session_params", "priority", "extra_key", "routing_key", "bootstrap_room", "stop", "x"),
    ),
    ("POST", "/tokenize"): ("text", "session_id", "rid", "x"),
    ("PUT", "/anything"): ("session_id", "rid", "model", "x"),
}


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Names of the properties of ``schema``, however it is put together."""
    if "$ref" in schema:
        yield from _fields(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    for one in (*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _fields(one)
    yield from schema.get("properties", ())


def _routes() -> Iterator[Route]:
    for method, path, operation in operations():
        body = (
            operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        )
        named = path.replace("{", "").replace("}", "")
        least = tuple(_LEAST.get(path, ()))
        if method != "GET":
            yield Route(
                method, named, least, tuple(dict.fromkeys((*_fields(body), "session_id", "rid", "x")))
            )
    for (method, path), fields in _PROXIED.items():
        yield Route(method, path, tuple(_LEAST.get(path, ())), fields)


#: Every route that may read a body.
ROUTES = list(_routes())
#: Those that do most with it come up more often.
_DRAWN = [*ROUTES, *(route for route in ROUTES if route.path in _LEAST for _ in range(8))]


class AnyRequest:
    """One request. No dataclass, either."""

    def __init__(self, route: Route, body: Part, headers: Sequence[tuple[str, str]] = ()) -> None:
        self.route = route
        self.body = body
        self.headers = headers

    def __repr__(self) -> str:
        return f"{self.route.method} {self.route.path} {self.body}{' ' if self.headers else ''}{self.headers or ''}"


_HEADERS: Sequence[Sequence[tuple[str, str]]] = (
    (),
    (),
    (),
    (("x-session-id", "one"),),
    (("x-request-id", "r" * 900),),
)


@st.composite
def asked(draw: st.DrawFn) -> AnyRequest:
    """A request with any body, most of them objects whose members have the names that the route knows."""
    route = draw(st.sampled_from(_DRAWN))
    headers = draw(st.sampled_from(_HEADERS))
    if draw(st.integers(0, 5)) == 0:
        return AnyRequest(route, draw(_VALUES), headers)
    meant = [name for name in route.fields if name in MEANT]
    has_meaning: bool = draw(st.booleans())
    if meant and has_meaning:
        name = draw(st.sampled_from(meant))
        piece, size = draw(st.sampled_from(MEANT[name])), draw(_sizes)
        odd = [(name, items(piece, _fitting(size, piece)))]
    else:
        odd = [(draw(st.sampled_from(route.fields)), draw(_VALUES))]
    if draw(st.booleans()):
        odd.append((draw(st.sampled_from(route.fields)), draw(_scalars)))
    # A name that comes again, or two that rule each other out, are a matter of chance.
    names = {name for name, _ in odd}
    has_one_prompt: bool = draw(st.booleans())
    if "input_ids" in names and has_one_prompt:
        names.add("text")
    least = [
        (name, plain(value))
        for name, value in route.least
        if name not in names or draw(st.integers(0, 9)) == 0
    ]
    return AnyRequest(route, members_of([*least, *odd]), headers)
