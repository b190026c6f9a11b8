"""Protocols of a language model and of its tokenizer; any objects with these methods will do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from router_core.types import Tokenizer

__all__ = ["FloatArray", "LanguageModel", "ModelTokenizer"]

FloatArray = npt.NDArray[np.float64]


class ModelTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also say what each token adds to a text, and write itself to files."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """By id, what a token adds to the text; it may end inside a UTF-8 character."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Left out by ``skip_special_tokens``."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Each of them ends a generation."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
    ) -> str:
        """Text of a conversation. Raises jinja2.TemplateError when the messages do not fit the template."""
        ...

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads."""
        ...


class LanguageModel(Protocol):
    """Logits of the next token, a function of the tokens before it and of the weights' version."""

    @property
    def tokenizer(self) -> ModelTokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def obeys(self) -> Collection[str]:
        """Sampling parameters such as ``json_schema`` that it honours by itself; an engine refuses the others."""
        ...

    def next_logits(self, context: Sequence[int], version: str, end: int | None = None) -> FloatArray:
        """Finite logits, shape ``[vocab_size]``, behind ``context[:end]``; the caller owns the array."""
        ...
