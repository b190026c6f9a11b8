"""Fixtures of the radix cache's tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radix_cache.scripted import Client, ScriptedEngine, routed
from slime_engine.tokenizer import EngineTokenizer, corpus_documents, train_tokenizer

if TYPE_CHECKING:
    from routers import Start


@pytest.fixture(scope="session")
def tokenizer() -> EngineTokenizer:
    return train_tokenizer(corpus_documents())


@pytest.fixture(scope="session")
def checkpoint(tokenizer: EngineTokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(path)
    configuration = {
        "eos_token_id": sorted(tokenizer.eos_ids)
    }  # the model's own; the tokenizer names one of them
    (path / "generation_config.json").write_text(json.dumps(configuration))
    return str(path)


@pytest.fixture
def engine(tokenizer: EngineTokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
async def client(start: Start, engine: ScriptedEngine, checkpoint: str) -> AsyncIterator[Client]:
    async with routed(start, engine, checkpoint) as client:
        yield client
