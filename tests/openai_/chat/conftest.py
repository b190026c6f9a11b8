"""A fixture of all tests of chats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime_openai.prompts.locality import Proof
from slime_openai.prompts.rendering import Renderer

_PROOFS: dict[object, Proof | None] = {}


@pytest.fixture(scope="module", autouse=True)
def _one_proof() -> Iterator[None]:
    """Prove each chat template once, and not for each router, which takes 20 ms. Tests of ``prompts`` prove each."""
    prove = Renderer._proved

    def proved_once(renderer: Renderer, source: object) -> Proof | None:
        key = str(source), renderer._form, type(renderer._template._tokenizer)
        if key not in _PROOFS:
            _PROOFS[key] = prove(renderer, source)
        return _PROOFS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Renderer, "_proved", proved_once)
        yield
