"""Chat templates that are examined once, and not for each router, which takes 50 ms of processor time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slime_openai.prompts import rendering
from slime_openai.prompts.locality import Proof
from slime_openai.prompts.rendering import Renderer
from slime_openai.prompts.template_traits import Render, TemplateTraits, probe

__all__ = ["templates_known"]

_PROOFS: dict[object, Proof | None] = {}
_TRAITS: dict[object, TemplateTraits] = {}


def _key(renderer: Renderer) -> object:
    tokenizer = renderer._template._tokenizer
    special = str(getattr(tokenizer, "special_tokens_map", None))
    return renderer.source, renderer._form, type(tokenizer), special


@contextmanager
def templates_known() -> Iterator[None]:
    """Use what an earlier renderer of the same template found out about it."""
    prove = Renderer._proved

    def proved_once(renderer: Renderer, source: object) -> Proof | None:
        key = _key(renderer), str(source)
        if key not in _PROOFS:
            _PROOFS[key] = prove(renderer, source)
        return _PROOFS[key]

    def probed_once(render: Render) -> TemplateTraits:
        renderer: Renderer = render.__self__  # type: ignore[attr-defined]
        key = _key(renderer)
        if key not in _TRAITS:
            _TRAITS[key] = probe(render)
        return _TRAITS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Renderer, "_proved", proved_once)
        patch.setattr(rendering, "probe", probed_once)
        yield
