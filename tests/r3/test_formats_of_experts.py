"""Recorded experts in each form in which a trainer reads them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import safetensors.numpy

from r3.replays import PROMPT, SHAPE, Replay, replaying, rows_in
from slime_engine.model import NgramModel
from slime_radix_cache.client import AsyncClient, NotExact

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
TEXT = "/retrieve_from_text"
Array = npt.NDArray[Any]


async def read(replay: Replay, path: str, accept: str = "application/json", **body: Any) -> bytes:
    """The answer to a question; without a ``body`` it is a GET."""
    client, headers = replay.running.client, {"accept": accept}
    answer = await (
        client.post(path, json=body, headers=headers) if body else client.get(path, headers=headers)
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    return answer.content


def check(replay: Replay, tokens: Array, rows: Array, kind: type = np.uint8) -> None:
    assert rows.dtype == kind
    assert rows.shape == (len(tokens) - 1, *SHAPE)
    assert rows.tolist() == replay.rows(tokens.tolist()).tolist()


async def test_a_text_has_its_experts_in_each_format(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        text = PROMPT + (await replay.generate(PROMPT, "s"))["text"]
        asked = {"text": text, "return_routed_experts": True}
        document = orjson.loads(await read(replay, TEXT, **asked, routed_experts_format="npy"))
        tokens = np.array(document["tokens"])
        check(replay, tokens, np.load(BytesIO(base64.b64decode(document["routed_experts"]))))
        assert document["experts_exact"]
        with np.load(BytesIO(await read(replay, TEXT, "application/octet-stream", **asked))) as file:
            check(replay, file["tokens"], file["routed_experts"])
            assert orjson.loads(file["about"].tobytes())["experts_exact"]
        body = await read(replay, TEXT, "application/x-safetensors", **asked)
        tensors = safetensors.numpy.load(body)
        check(replay, tensors["tokens"], tensors["routed_experts"])
        assert tensors["loss_mask"].tolist() == document["loss_mask"]
        size = int.from_bytes(body[:8], "little")
        about = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["about"])
        assert (about["exact"], about["experts_exact"], about["response"]) == (True, True, text)


async def test_a_format_that_is_not_known_is_refused(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        client = replay.running.client
        wrong = await client.post(TEXT, json={"text": "a", "routed_experts_format": "pt"})
        assert wrong.status_code == 400
        assert (
            wrong.json()["error"]["message"] == '"routed_experts_format" must be "int32" or "npy", got \'pt\''
        )
        await replay.generate(PROMPT, "s")
        wrong = await client.get("/trajectories/s?return_routed_experts=yes")
        assert (
            wrong.json()["error"]["message"] == "\"return_routed_experts\" must be true or false, got 'yes'"
        )


async def forked(replay: Replay) -> None:
    """A session with two leaves, of which the second lacks the rows of its last turn."""
    ends: dict[str, Any] = {"sampling_params": {"max_new_tokens": 2000}}  # with EOS
    text = PROMPT + (await replay.generate(PROMPT, "s", **ends))["text"] + NEXT
    await replay.generate(text + "a", "s", **ends)
    await replay.generate(text + "b", "s", **ends, return_routed_experts=False)


async def test_each_leaf_of_a_session_has_its_experts_or_says_why_not(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        await forked(replay)
        path = "/trajectories/s?return_routed_experts=true"
        first, second = orjson.loads(await read(replay, path))["trajectories"]
        assert rows_in(first["routed_experts"]).tolist() == replay.rows(first["tokens"]).tolist()
        assert (second["exact"], second["experts_exact"], second["routed_experts"]) == (True, False, None)
        assert second["routed_experts_reason"] == "not_told"
        with np.load(BytesIO(await read(replay, path, "application/octet-stream"))) as file:
            assert file["experts_offsets"].tolist() == [
                0,
                first["token_length"] - 1,
                first["token_length"] - 1,
            ]
            check(replay, np.array(first["tokens"]), file["routed_experts"])
        tensors = safetensors.numpy.load(await read(replay, path, "application/x-safetensors"))
        check(replay, tensors["tokens.0"], tensors["routed_experts.0"])
        assert "routed_experts.1" not in tensors
        assert "routed_experts" not in orjson.loads(await read(replay, "/trajectories/s"))["trajectories"][0]


async def test_samples_have_the_experts_as_miles_reads_them(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        await forked(replay)
        answer = await replay.running.client.post("/sessions/s/samples", json={"include_retries": True})
        assert answer.status_code == 200, answer.text
        tensors = safetensors.numpy.load(answer.content)
        about = json.loads(tensors.pop("_samples_meta").tobytes())["samples"]
        exact = [sample["metadata"]["experts_exact"] for sample in about]
        assert sorted(exact) == [False, True]
        for number, sample in enumerate(about):
            name = f"rollout_routed_experts.{number}"
            assert (
                ("rollout_routed_experts" in sample["nulls"]) == (name not in tensors) == (not exact[number])
            )
            if exact[number]:
                check(replay, tensors[f"tokens.{number}"], tensors[name], np.int32)
            else:
                assert sample["metadata"]["routed_experts_reason"] == "not_told"


async def test_a_sample_that_is_cut_has_the_experts_of_its_tokens(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay:
        output = await replay.generate(PROMPT, "s")
        longest = output["meta_info"]["prompt_tokens"] + 3
        answer = await replay.running.client.post("/sessions/s/samples", json={"max_seq_len": longest})
        tensors = safetensors.numpy.load(answer.content)
        assert len(tensors["tokens.0"]) == longest
        check(replay, tensors["tokens.0"], tensors["rollout_routed_experts.0"], np.int32)


async def test_the_client_fills_the_experts_into_a_sample(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with replaying(start, model, checkpoint) as replay, AsyncClient(replay.running.url) as client:
        response = (await replay.generate(PROMPT, "s"))["text"]
        sample = SimpleNamespace(prompt=PROMPT, response=response)
        await client.fill(sample, session="s", routed_experts=True)
        check(replay, np.array(sample.tokens), sample.rollout_routed_experts, np.int32)
        other = SimpleNamespace(prompt=PROMPT, response=response)
        await client.fill(other, session="s")
        assert not hasattr(other, "rollout_routed_experts")
        silent = PROMPT + "b"
        other.prompt, other.response = (
            silent,
            (await replay.generate(silent, "t", return_routed_experts=False))["text"],
        )
        with pytest.raises(NotExact, match="not_told"):
            await client.fill(other, session="t", routed_experts=True)
        await client.fill(other, session="t", routed_experts=True, allow_inexact=True)
        assert other.rollout_routed_experts is None
