"""Fixtures of the radix cache's tests, through which generations are resumed."""

from radix_cache.conftest import checkpoint, client, engine, tokenizer

__all__ = ["checkpoint", "client", "engine", "tokenizer"]
