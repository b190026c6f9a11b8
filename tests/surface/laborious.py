"""Requests that take long when they are worked on in one go, up to a megabyte of each."""

from __future__ import annotations

from collections.abc import Mapping

from surface.any_json import MEANT, ROUTES, AnyRequest
from surface.json_parts import Part, items, member, members_of, plain, string

__all__ = ["BATCH", "LABORIOUS"]


def _laborious(path: str, *members: tuple[str, Part]) -> AnyRequest:
    (route,) = (route for route in ROUTES if (route.method, route.path) == ("POST", path))
    given = {name for name, _ in members}
    return AnyRequest(
        route, members_of([*((name, plain(one)) for name, one in route.least if name not in given), *members])
    )


_GENERATE, _CHAT, _COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
_MESSAGE = b'{"role":"user","content":"a"}'
#: Bodies that take long when they are read in one go, with a megabyte of each.
LABORIOUS: Mapping[str, AnyRequest] = {
    "id lists": _laborious(_GENERATE, ("text", plain(b"null")), ("input_ids", items(b"[1]", 50_000))),
    "texts": _laborious(_GENERATE, ("text", items(b'"a sample"', 90_000))),
    "ids": _laborious(_GENERATE, ("text", plain(b"null")), ("input_ids", items(b"1", 500_000))),
    "ids of 5 digits": _laborious(
        _GENERATE, ("text", plain(b"null")), ("input_ids", items(b"12345", 160_000))
    ),
    "one text": _laborious(_GENERATE, ("text", string(b"a b ", 250_000))),
    "one text without white space": _laborious(_GENERATE, ("text", string(b"abcdefgh", 120_000))),
    "one chat message": _laborious(
        _CHAT, ("messages", items(b'{"role":"user","content":"%b"}' % (b"a b " * 250_000), 1))
    ),
    "chat messages": _laborious(_CHAT, ("messages", items(_MESSAGE, 16_000))),
    "parts of a message": _laborious(
        _CHAT,
        (
            "messages",
            items(b'{"role":"user","content":[%b]}' % b",".join([b'{"type":"text","text":"a"}'] * 20_000), 1),
        ),
    ),
    "tools": _laborious(_CHAT, ("tools", items(MEANT["tools"][0], 12_000))),
    "stop strings": _laborious(_CHAT, ("stop", items(b'"a"', 150_000))),
    "empty lists": AnyRequest(
        next(route for route in ROUTES if route.path == _GENERATE), items(b"[]", 330_000)
    ),
    "many samples": _laborious(_GENERATE, ("sampling_params", plain(b'{"n":1000000000}'))),
    "sampling parameters": _laborious(_GENERATE, ("sampling_params", items(b"{}", 150_000))),
    "rids": _laborious(_GENERATE, ("rid", items(b'"a"', 150_000))),
    "deep in long keys": _laborious(
        _GENERATE,
        ("a", plain((b'{"%b":' % (rb"\n" * 512)) * 200 + b"[%b2]" % (b"1," * 20_000) + b"}" * 200)),
    ),
    "spaces": _laborious(_GENERATE, ("a", plain(b"[1,%b2]" % (b" " * 900_000)))),
    "prompts": _laborious(_COMPLETIONS, ("prompt", items(b'"a"', 100_000))),
    "prompts of ids": _laborious(_COMPLETIONS, ("prompt", items(b"[1]", 50_000))),
    "a prompt of ids": _laborious(_COMPLETIONS, ("prompt", items(b"1", 300_000))),
    "a text to read": _laborious("/retrieve_from_text", ("text", string(b"a b ", 250_000))),
    "messages to read": _laborious("/retrieve_from_messages_template", ("messages", items(_MESSAGE, 16_000))),
    "a session at the end": _laborious(
        _GENERATE, ("x", items(b"[1]", 120_000)), ("session_id", plain(b'"last"'))
    ),
    "many members": _laborious(_GENERATE, ("x", member(b"%d", 40_000))),
}
#: As many prompts as the test's router takes in one request, all the same.
BATCH = _laborious(_GENERATE, ("text", plain(b"null")), ("input_ids", items(b"[7]", 250)))
