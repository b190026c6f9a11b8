"""The backend that the settings name."""

from __future__ import annotations

import logging
from pathlib import Path

from slime_engine.backend import Backend
from slime_engine.model import load_model
from slime_engine.model_files import check_installed, find_model
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend

__all__ = ["check_backend", "load_backend"]

logger = logging.getLogger(__name__)


def check_backend(settings: Settings) -> None:
    """Check that the backend's libraries and files are there, without loading them. Raises ValueError."""
    if settings.backend == "transformers":
        check_installed()
        find_model(settings.model)


def load_backend(settings: Settings) -> Backend:
    """Load the backend. Raises ValueError or OSError."""
    if settings.backend == "ngram":
        return StatelessBackend(load_model(), settings)
    path = find_model(settings.model)
    logger.info("loading the model %s", settings.model)  # before the slow imports and the load
    # imported here, since they need torch, which is an extra
    from slime_engine.hf.backend import TransformersBackend
    from slime_engine.hf.converted import converted  # torch
    from slime_engine.hf.weights import Checkpoint  # torch

    if path.is_file():
        cache = settings.model_cache
        path = converted(path, Path.home() / ".cache" / "slime-router" if cache is None else Path(cache))
    return TransformersBackend(Checkpoint(path, settings.threads), settings.prefix_cache_tokens)
