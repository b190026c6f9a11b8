"""Answers in JSON, msgpack and npz: bit for bit the same."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import orjson
import pytest

from radix_cache.scripted import Client, bits

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
MSGPACK, NPZ = "application/x-msgpack", "application/octet-stream"


ARRAYS = ("tokens", "loss_mask", "rollout_logp", "version_index")


def loaded(body: bytes) -> dict[str, Any]:
    """An npz file's arrays, and what ``about`` says."""
    with np.load(io.BytesIO(body), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return {**orjson.loads(arrays.pop("about").tobytes()), **arrays}


def as_json(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form of an answer with arrays; its logprobs must not differ in a bit."""
    names = answer.pop("version_names")
    versions = [names[index] if index >= 0 else -1 for index in answer.pop("version_index").tolist()]
    logprobs = [None if np.isnan(value) else value for value in answer.pop("rollout_logp").tolist()]
    rest = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in answer.items()}
    return {**rest, "generation_versions": versions, "rollout_logp": logprobs}


@pytest.fixture
async def spoken(client: Client) -> str:
    """A conversation whose responses have logprobs that are no float32, none, and a version or none."""
    text: str = PROMPT + (await client.generate(PROMPT, [5, 6, 7], session="s p"))["text"] + NEXT
    client.engine.meta = {"weight_version": None}
    text += (await client.generate(text, [8, 9], session="s p", return_logprob=False))["text"]
    client.engine.meta = {"weight_version": "2"}
    text += NEXT
    answer = await client.generate(text, [9], session="s p")
    return text + str(answer["text"])


async def test_of_one_text(client: Client, spoken: str) -> None:
    asked = {"text": spoken, "session_id": "s p"}
    plain, packed, zipped = [
        await client.running.client.post("/retrieve_from_text", json=asked, headers={"accept": accept})
        for accept in ("*/*", MSGPACK, NPZ)
    ]
    wanted = plain.json()
    assert wanted["inexact_reason"] == "no_logprobs"
    assert wanted["generation_versions"][-1] == "2"
    assert None in wanted["generation_versions"]
    assert None in wanted["rollout_logp"]
    assert packed.headers["content-type"] == MSGPACK
    unpacked = msgpack.unpackb(packed.content)
    arrays = {
        name: np.frombuffer(value["data"], value["dtype"])
        for name, value in unpacked.items()
        if isinstance(value, dict) and "dtype" in value
    }
    assert as_json({**unpacked, **arrays}) == wanted
    assert zipped.headers["content-type"] == NPZ
    assert as_json(loaded(zipped.content)) == wanted


async def test_of_a_session(client: Client, spoken: str) -> None:
    await client.generate(PROMPT, [5], session="s p")
    await client.generate("else", [7, 8], session="s p")
    plain, packed, zipped = [
        await client.running.client.get("/trajectories/s%20p", headers={"accept": accept})
        for accept in ("application/json", MSGPACK, NPZ)
    ]
    wanted = plain.json()
    assert len(wanted["trajectories"]) == 3
    unpacked = msgpack.unpackb(packed.content)
    for record in unpacked["trajectories"]:
        for name, value in record.items():
            if isinstance(value, dict) and "dtype" in value:
                record[name] = np.frombuffer(value["data"], value["dtype"])
    records = [as_json(record) for record in unpacked.pop("trajectories")]
    assert {**unpacked, "trajectories": records} == wanted
    file = loaded(zipped.content)
    ends = file.pop("offsets").tolist()
    names = file.pop("version_names")
    records = [
        as_json(
            {
                **about,
                "version_names": names,
                **{name: file[name][start:end] for name in ARRAYS},
            }
        )
        for about, (start, end) in zip(file.pop("trajectories"), pairwise(ends), strict=True)
    ]
    about = {name: value for name, value in file.items() if name not in ARRAYS}
    assert {**about, "trajectories": records} == wanted


async def test_logprobs_that_are_not_wanted_are_in_none(client: Client, spoken: str) -> None:
    for accept in ("*/*", MSGPACK, NPZ):
        answer = await client.running.client.post(
            "/retrieve_from_text",
            json={"text": spoken, "return_logp": False},
            headers={"accept": accept},
        )
        assert answer.status_code == 200
        assert b"rollout_logp" not in answer.content
        assert b"tokens" in answer.content


@pytest.mark.parametrize(
    ("accept", "type"),
    [
        ("text/html", "application/json"),
        ("", "application/json"),
        ("application/json, application/x-msgpack;q=0.9", "application/json"),
        ("application/json;q=0.1, application/x-msgpack;q=0.9", MSGPACK),
        ("Application/X-MsgPack", MSGPACK),
        ("application/x-msgpack;q=0", "application/json"),
        ("application/x-msgpack;q=much", "application/json"),
        ("application/octet-stream;v=1;q=0.5, */*;q=0.1", NPZ),
    ],
)
async def test_the_one_liked_best_is_taken_and_json_if_none_is_known(
    client: Client, accept: str, type: str
) -> None:
    asked = {"text": "never seen"}
    answer = await client.running.client.post("/retrieve_from_text", json=asked, headers={"accept": accept})
    assert answer.headers["content-type"] == type


async def test_long_answers_are_the_same(client: Client) -> None:
    """They are written in a thread."""
    answer = await client.generate("x", list(range(300, 400)) * 200)
    for accept in ("*/*", MSGPACK, NPZ):
        reply = await client.running.client.post(
            "/retrieve_from_text", json={"text": "x" + answer["text"]}, headers={"accept": accept}
        )
        if accept == "*/*":
            wanted = reply.json()
            assert wanted["exact"]
            assert wanted["tokens"] == client.last()[0]
            assert bits(wanted["rollout_logp"]) == client.last()[2]
        elif accept == NPZ:
            assert as_json(loaded(reply.content)) == wanted
