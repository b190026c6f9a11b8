"""The tokenizer of the routers and engines of these tests."""

from __future__ import annotations

import pytest

from slime_engine.tokenizer import EngineTokenizer, corpus_documents, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> EngineTokenizer:
    return train_tokenizer(corpus_documents())


@pytest.fixture(scope="session")
def checkpoint(tokenizer: EngineTokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(path)
    return str(path)
