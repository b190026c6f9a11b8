"""Streams whose engine takes back or changes what it said are recorded as not exact."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from radix_cache.claims import PROMPT, session_of, until
from radix_cache.outputs import events, output, stream
from radix_cache.scripted import Client, ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

IDS = [5, 6, 7, 8, 9]
DOUBTED: set[tuple[bool, str | None]] = {(False, "engine_contradicts_itself")}
EXACT: set[tuple[bool, str | None]] = {(True, None)}


def told_by(client: Client, ids: list[int] = IDS, **facts: Any) -> list[dict[str, Any]]:
    """Return cumulative events, one for each of ``ids``. ``facts``: figures in each ``meta_info``."""
    told = [output(client, ids[:end]) for end in range(1, len(ids) + 1)]
    for one in told:
        meta = one["meta_info"]
        order = ("finish_reason", "output_token_logprobs", "completion_tokens")
        one["meta_info"] = facts | {name: meta[name] for name in order}
    for one in told[:-1]:
        one["meta_info"]["finish_reason"] = None
    return told


async def verdicts(client: Client) -> set[tuple[bool, str | None]]:
    document = await session_of(client, "a")
    return {(record["exact"], record["inexact_reason"]) for record in document["trajectories"]}


async def has_verdicts(client: Client, expected: set[tuple[bool, str | None]]) -> bool:
    return await verdicts(client) == expected


def raw(*data: bytes) -> tuple[int, bytes]:
    return 200, b"".join(b"data: %s\n\n" % one for one in (*data, b"[DONE]"))


async def test_second_event_that_is_shorter_is_a_contradiction(client: Client) -> None:
    first, second, last = (output(client, [5] * size) for size in (4, 2, 6))
    first["meta_info"]["finish_reason"] = second["meta_info"]["finish_reason"] = None
    await stream(client, "a", events(first, second, last))
    assert await verdicts(client) == DOUBTED


@pytest.mark.parametrize(("versions", "expected"), [("11221", DOUBTED), ("11222", EXACT)])
async def test_weight_version_that_returns_is_a_contradiction(
    client: Client, versions: str, expected: set[tuple[bool, str | None]]
) -> None:
    """No token has the version of the last event alone."""
    told = told_by(client)
    for one, version in zip(told, versions, strict=True):
        one["meta_info"] = {"weight_version": version} | one["meta_info"]
    await stream(client, "a", events(*told))
    assert await verdicts(client) == expected
    (record,) = (await session_of(client, "a"))["trajectories"]
    assert not {"1", "2"} & {*record["generation_versions"]}


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("changed", [None, 0, 1, 2])
@pytest.mark.parametrize("is_null", [True, False])
async def test_logprobs_of_an_event_without_ids_are_compared(
    client: Client, place: int, changed: int | None, is_null: bool
) -> None:
    told = told_by(client)
    del told[place]["output_ids"]
    if is_null:
        told[place]["output_ids"] = None
    logprobs = told[place]["meta_info"]["output_token_logprobs"]
    if changed is not None:
        logprobs[min(changed, place)] = [-9.0, 7, None]
    await stream(client, "a", events(*told))
    assert await verdicts(client) == (EXACT if changed is None else DOUBTED)


@pytest.mark.parametrize(
    ("facts", "is_exact"),
    [
        ({}, True),
        ({"completion_tokens": None, "routed_experts": None, "e2e_latency": 2}, True),
        ({"weight_version": "2"}, False),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 5}]}, False),
        ({"completion_tokens": 99}, False),
        ({"routed_experts": "AAAA"}, False),
        ({"output_token_logprobs": [[-0.5, one, None] for one in [*IDS, 4]]}, False),
    ],
)
async def test_event_behind_the_end_that_changes_a_fact_is_a_contradiction(
    client: Client, facts: dict[str, Any], is_exact: bool
) -> None:
    told = told_by(client, weight_version="1")
    again = told[-1] | {"meta_info": told[-1]["meta_info"] | facts}
    await stream(client, "a", events(*told, again))
    assert (await verdicts(client) == EXACT) == is_exact


def spans_of(versions: str) -> list[dict[str, Any]]:
    """Return one span for each of ``versions``."""
    return [{"version": one, "start": place, "end": place + 1} for place, one in enumerate(versions)]


@pytest.mark.parametrize("empty", [None, []])
@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize(
    ("before", "versions", "expected"),
    [
        ("1111", "55555", DOUBTED),
        ("1111", "51111", DOUBTED),
        ("1111", "11112", EXACT),
        ("1122", "11255", DOUBTED),
        ("1122", "11122", EXACT),
        ("1122", "11222", EXACT),
    ],
)
async def test_spans_contradict_versions_before_them(
    client: Client,
    before: str,
    versions: str,
    expected: set[tuple[bool, str | None]],
    first: int,
    empty: list[Any] | None,
) -> None:
    """The spans come only with the last event. ``first``: facts in front of the logprobs differ from this event on."""
    told = told_by(client)
    for place, one in enumerate(told):
        last = place == len(told) - 1
        facts = {"weight_version": (before + versions[-1])[place], "x-figure": place >= first}
        one["meta_info"] = (
            facts | one["meta_info"] | {"weight_versions": spans_of(versions) if last else empty}
        )
    await stream(client, "a", events(*told))
    assert await verdicts(client) == expected


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("version", ["1", "9", None])
async def test_version_that_is_not_that_of_the_last_span_is_a_contradiction(
    client: Client, place: int, version: str | None
) -> None:
    """The first token may have another version: a prefill worker's."""
    told = told_by(client)
    for end, one in enumerate(told, 1):
        one["meta_info"] |= {"weight_version": "1", "weight_versions": spans_of("1" * end)}
    told[place]["meta_info"]["weight_version"] = version
    await stream(client, "a", events(*told))
    assert await verdicts(client) == (DOUBTED if version == "9" and place else EXACT)


@pytest.mark.parametrize("other", ["other", "r"])
async def test_another_request_id_in_the_middle_is_a_contradiction(client: Client, other: str) -> None:
    told = told_by(client, id="r")
    told[3]["meta_info"]["id"] = other
    await stream(client, "a", events(*told), rid="r")
    assert await verdicts(client) == (EXACT if other == "r" else DOUBTED)


@pytest.mark.parametrize("key", ["x-figure", "completion_tokens"])
@pytest.mark.parametrize("changed", [True, False])
async def test_logprobs_after_a_token_with_brackets_are_compared(
    client: Client, key: str, changed: bool
) -> None:
    """The key behind the logprobs may have any name."""
    told = told_by(client)
    for one in told:
        one["meta_info"]["output_token_logprobs"] = [
            [-0.5, token, "]]"] for _, token, _ in one["meta_info"]["output_token_logprobs"]
        ]
        one["meta_info"] = {
            name: one["meta_info"].get(name, 0)
            for name in ("finish_reason", "output_token_logprobs", key, "completion_tokens")
        }
    if changed:
        told[3]["meta_info"]["output_token_logprobs"][1][0] = -0.75
    await stream(client, "a", events(*told))
    assert await verdicts(client) == (DOUBTED if changed else EXACT)


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ": "), (", ", ":")])
@pytest.mark.parametrize("place", [1, 2, 3, None])
async def test_logprobs_with_spaces_are_compared(
    client: Client, separators: tuple[str, str], place: int | None
) -> None:
    told = told_by(client)
    if place is not None:
        told[place]["meta_info"]["output_token_logprobs"][0][0] = -0.75
    await stream(client, "a", raw(*(json.dumps(one, separators=separators).encode() for one in told)))
    assert await verdicts(client) == (EXACT if place is None else DOUBTED)


@pytest.mark.parametrize("member", ['"text":""', '"output_ids":[5]'])
async def test_second_text_or_ids_behind_the_logprobs_are_a_contradiction(
    client: Client, member: str
) -> None:
    """The stream breaks off after the event."""
    data = [orjson.dumps(one) for one in told_by(client)[:4]]
    data[3] = data[3][:-1] + f",{member}}}".encode()
    await stream(client, "a", (200, b"".join(b"data: %s\n\n" % one for one in data)))
    assert EXACT.isdisjoint(await verdicts(client))


async def test_part_that_a_question_recorded_does_not_stay_exact(client: Client) -> None:
    """The stream goes on with fewer tokens than were recorded."""
    engine = client.engine
    engine.hold, engine.hold_after = anyio.Event(), 3
    engine.script.append([*told_by(client)[:3], output(client, IDS[:2])])
    body = {"text": PROMPT, "stream": True, "session_id": "a"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(client.running.client.post, "/generate", json=body))
        await until(partial(has_verdicts, client, EXACT))
        engine.hold.set()
    assert await verdicts(client) == DOUBTED


@pytest.mark.parametrize(("logprob", "expected"), [(-0.5, EXACT), (-0.75, DOUBTED)])
async def test_abort_that_contradicts_its_stream_is_no_evidence(
    start: Start,
    engine: ScriptedEngine,
    checkpoint: str,
    logprob: float,
    expected: set[tuple[bool, str | None]],
) -> None:
    """The client gets deltas, and does not see the abort, which has all logprobs: another attempt continues."""
    flags = ("--abort-retry-wait-s", "0", "--resume-aborted")
    async with routed(start, engine, checkpoint, *flags) as client:
        deltas = [output(client, [token]) for token in IDS[:3]]
        for place, one in enumerate(deltas, 1):
            one["meta_info"] |= {"finish_reason": None, "completion_tokens": place}
        abort = output(client, IDS[:3]) | {"output_ids": IDS[2:3]}
        abort["meta_info"]["finish_reason"] = {"type": "abort"}
        abort["meta_info"]["output_token_logprobs"][0][0] = logprob
        engine.script += [events(*deltas, abort), events(output(client, [9]))]
        engine.media_type = "text/event-stream"
        body = {"text": PROMPT, "stream": True, "session_id": "a", "return_logprob": True}
        await client.running.client.post("/generate", json=body)
        assert await verdicts(client) == expected
