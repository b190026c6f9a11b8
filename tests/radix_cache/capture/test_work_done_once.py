"""The work for one request: nothing is parsed or walked twice, and what can wait waits for the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from http_.conversations import watch_server
from radix_cache.capture.coded import watch_json
from router_core.cli import is_compiled
from slime_radix_cache.capture import replies
from slime_radix_cache.capture.turns import Turns
from slime_sglang import evidence

if TYPE_CHECKING:
    from radix_cache.scripted import Client

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(is_compiled(), reason="a compiled method cannot be replaced"),
]

PROMPT = "The cat sat on the mat. " * 20
IDS = [300 + number for number in range(40)]


async def test_request_and_answer_are_parsed_once_and_ids_become_json_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.generate(PROMPT, IDS, "a")
    text = PROMPT + first["text"] + " And then?"
    seen = watch_json(monkeypatch)
    await client.generate(text, IDS[:20], "a", rid="mine")
    monkeypatch.undo()
    asked, sent, answered = seen
    assert [one.how for one in seen] == ["parsed", "written", "parsed"]
    assert asked.value["text"] == text
    assert orjson.loads(sent.data)["input_ids"] == client.engine.consumed[-1]
    assert type(sent.value["input_ids"]) is np.ndarray  # no list of Python's integers
    assert answered.value["output_ids"] == IDS[:20]
    assert client.engine.consumed[-1][: -len(client.engine.tokenizer.encode(" And then?"))][-40:] == IDS


async def test_logprobs_are_walked_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    walk = evidence.columns_of

    def noted(logprobs: Any) -> Any:
        walks.append(len(logprobs))
        return walk(logprobs)

    monkeypatch.setattr(evidence, "columns_of", noted)
    monkeypatch.setattr(replies, "columns_of", noted)
    await client.generate(PROMPT, IDS, "a")
    assert walks == [40]
    [record] = await client.records("a")
    assert record["exact"]


async def test_cumulative_stream_is_recorded_from_its_last_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_json(monkeypatch)
    client.engine.script.append(IDS)
    body = {"text": PROMPT, "stream": True, "session_id": "a"}
    answer = await client.running.client.post("/generate", json=body)
    monkeypatch.undo()
    assert answer.text.count("data: ") == len(IDS) + 1
    events = [
        len(one.value["output_ids"]) for one in seen if one.how == "parsed" and "output_ids" in one.value
    ]
    assert len(events) <= 3  # the first two tell that events are cumulative
    assert events[-1] == len(IDS)
    [record] = await client.records("a")
    assert record["exact"]
    assert record["tokens"][-40:] == IDS


async def test_turn_is_recorded_before_its_answer_leaves_and_ends_behind_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_server(monkeypatch)
    left: dict[str, list[int]] = {"record": [], "end": []}

    def note(name: str) -> None:
        method = getattr(Turns, name)

        def noted(self: Turns, *arguments: Any, **more: Any) -> Any:
            left[name].append(sum(b'"output_ids":' in written for written in seen.written))
            return method(self, *arguments, **more)

        monkeypatch.setattr(Turns, name, noted)

    note("record")
    note("end")
    await client.generate(PROMPT, IDS, "a")
    # The engine writes the answer, then the router does.
    assert left == {"record": [1], "end": [2]}
