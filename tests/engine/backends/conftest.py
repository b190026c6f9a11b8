"""One fixture, ``kind``, with every backend that can be tested here."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest

from engine.backends.kinds import Kind
from own_time import Backend as EventLoop
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend

#: Tiny models: one with a sliding window, and one with experts.
TINY: tuple[str, ...] = ("mistral", "qwen3_moe")
if os.environ.get("SLIME_ROUTER_FAMILIES") == "all":
    TINY = (*TINY, "mixtral", "olmoe")
HAS_TORCH = find_spec("torch") is not None
NEEDS_TORCH = pytest.mark.skipif(
    not HAS_TORCH, reason="needs torch: pip install 'slime-router[transformers-engine]'"
)


@pytest.fixture(scope="module")
def anyio_backend() -> EventLoop:
    """An ordinary clock: other threads compute while the loop waits for them."""
    return "asyncio", {}


def transformers_kind(name: str, model: NgramModel, factory: pytest.TempPathFactory) -> Kind:
    """A tiny model with random weights; version 2 has other random weights."""
    from engine.hf.tiny import save_tiny
    from slime_engine.hf.backend import TransformersBackend
    from slime_engine.hf.weights import Checkpoint

    one, two = [save_tiny(name, model.tokenizer, factory.mktemp(name), seed) for seed in (1, 2)]

    def load(settings: Settings) -> TransformersBackend:
        return TransformersBackend(Checkpoint(one), settings.prefix_cache_tokens)

    update = {"model_path": str(two), "weight_version": "2"}
    return Kind(name, load, update, tolerance=1e-4, reuses_prefixes=True, checkpoint=one)


@pytest.fixture(
    scope="session",
    params=["ngram", "simulated cache", *(pytest.param(name, marks=NEEDS_TORCH) for name in TINY)],
)
def kind(request: pytest.FixtureRequest, model: NgramModel, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    update = {"model_path": "next", "weight_version": "2"}
    if request.param == "simulated cache":

        def load(settings: Settings) -> StatelessBackend:
            return StatelessBackend(model, replace(settings, kv_cache_tokens=32768))

        return Kind("ngram", load, update, reuses_prefixes=True)
    if request.param != "ngram":
        return transformers_kind(request.param, model, tmp_path_factory)
    return Kind("ngram", lambda settings: StatelessBackend(model, settings), update)
