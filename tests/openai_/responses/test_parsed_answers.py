"""Whole answers that the recorder has parsed: a chat or completion made from them parses nothing again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from radix_cache.capture.coded import watch_json
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.scripted import ScriptedEngine, routed
from router_core.exchange import Exchange
from router_core.request import Request
from slime_sglang.bodies import answer_in, keep_parsed

if TYPE_CHECKING:
    from routers import Start

__all__ = ["checkpoint", "engine", "tokenizer"]

IDS = [300, 301, 302, 303]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", {"prompt": "hello"})])
async def test_answer_is_parsed_once(
    start: Start,
    engine: ScriptedEngine,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        engine.script.append(IDS)
        seen = watch_json(monkeypatch, larger_than=0)
        asked = {**body, "return_token_ids": True, "session_id": "a"}
        answer = await client.running.client.post(f"/v1/{path}", json=asked)
        monkeypatch.undo()
        [choice] = answer.json()["choices"]
        assert (choice["token_ids"], choice["exact"]) == (IDS, True)
        assert len([one for one in seen if one.how == "parsed" and b'"output_ids"' in one.data]) == 1


def test_answer_belongs_to_the_body_that_was_parsed() -> None:
    body, answer = b'{"text":"a"}', {"text": "parsed before"}
    exchange = Exchange(Request("POST", b"/generate", []), session=None)
    keep_parsed(exchange, body, answer)
    assert answer_in(exchange, body) is answer
    assert answer_in(exchange, b"".join((body, b" "))) == {"text": "a"}
    assert answer_in(exchange, bytes(bytearray(body))) == {"text": "a"}
    exchange.close()
    assert answer_in(exchange, body) == {"text": "a"}


def test_answer_whose_arrays_may_be_cut_out_is_parsed_again() -> None:
    whole = {"meta_info": {"routed_experts": "A" * (1 << 16)}}
    body = orjson.dumps(whole)
    exchange = Exchange(Request("POST", b"/generate", []), session=None)
    keep_parsed(exchange, body, {"meta_info": {"routed_experts": ""}})
    assert answer_in(exchange, body) == whole
