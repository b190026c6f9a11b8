"""The fixtures of the contract suite, for tests of the transformers backend alone."""

from engine.backends.conftest import anyio_backend, kind

__all__ = ["anyio_backend", "kind"]
