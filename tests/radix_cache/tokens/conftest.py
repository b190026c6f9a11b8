"""Each vocabulary, made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from radix_cache.tokens.vocabularies import VOCABULARIES, Vocabulary


@dataclass(frozen=True)
class Loaded:
    """A vocabulary, its tokenizer, and the checkpoint to load it from."""

    vocabulary: Vocabulary
    tokenizer: Any
    checkpoint: str


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.real else ()) for one in VOCABULARIES
    ],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    vocabulary: Vocabulary = request.param
    return Loaded(vocabulary, *vocabulary.make(tmp_path_factory.mktemp(vocabulary.name)))
