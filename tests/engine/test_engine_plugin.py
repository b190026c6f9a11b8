"""``--plugin engine``: engines in the router's own process."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from router_core import SettingsError
from slime_engine import add_options, make_plugin
from slime_engine.model import NgramModel
from slime_engine.tokenizer import EngineTokenizer

pytestmark = pytest.mark.anyio

Start = Callable[..., AbstractAsyncContextManager[Any]]


async def test_engines_are_started_and_registered_as_workers(start: Start) -> None:
    flags = ["--engine-workers", "2", "--engine-seed", "1", "--engine-model-name", "tiny"]
    async with start("--plugin", "engine", *flags) as running:
        workers = (await running.client.get("/workers")).json()["workers"]
        assert len(workers) == 2
        assert all(worker["is_healthy"] for worker in workers)
        assert {worker["model_id"] for worker in workers} == {"tiny"}
        answer = await running.client.post("/generate", json={"text": "Hello", "rid": "r"})
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["id"] == "r"
        tokenizer = running.router.components.get("tokenizer")
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
        pool = running.router.pool
        assert len(pool) == 2
    assert len(pool) == 0, "their engines are gone, so they are no workers any more"


async def test_a_tokenizer_that_is_there_already_stays(
    start: Start, model: NgramModel, tmp_path: Path
) -> None:
    model.tokenizer.save(tmp_path)
    flags = ["--plugin", "radix_cache", "--hf-checkpoint", str(tmp_path), "--plugin", "engine"]
    async with start(*flags) as running:
        assert not isinstance(running.router.components.get("tokenizer"), EngineTokenizer)


async def test_an_operator_may_remove_an_engine(start: Start) -> None:
    async with start("--plugin", "engine") as running:
        (worker,) = running.router.pool
        answer = await running.client.post("/remove_worker", json={"url": worker.url})
        assert answer.status_code == 200
        assert (await running.client.post(f"{worker.url}/generate", json={"text": "a"})).status_code == 200


async def test_engines_of_one_seed_differ_from_one_another(start: Start) -> None:
    async with start("--plugin", "engine", "--engine-workers", "2", "--engine-seed", "1") as running:
        answers = {
            (await running.client.post(f"{worker.url}/generate", json={"text": "The"})).json()["text"]
            for worker in running.router.pool
        }
    assert len(answers) == 2


@pytest.mark.parametrize("flags", [["--engine-workers", "0"], ["--engine-moe-layers", "-1"]])
def test_flags_that_cannot_work_end_the_start(flags: list[str]) -> None:
    parser = ArgumentParser()
    add_options(parser)
    with pytest.raises(SettingsError, match="--engine-"):
        make_plugin(parser.parse_args(flags))
