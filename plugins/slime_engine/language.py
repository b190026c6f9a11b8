"""Protocols of a language model and of its tokenizer; any objects with these methods will do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from router_core.types import Tokenizer

__all__ = ["FloatArray", "LanguageModel", "ModelTokenizer", "Vocabulary"]

FloatArray = npt.NDArray[np.float64]


class ModelTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows the bytes of each token, and that can be saved to files."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """By id, the bytes that a token adds to the text; they may end inside a UTF-8 character."""
        ...

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
    ) -> str:
        """Return the text of a conversation. Raises jinja2.TemplateError when the messages do not fit the template."""
        ...

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads."""
        ...


class Vocabulary(Protocol):
    """The tokens that a model samples from, and the sampling parameters that it honours by itself."""

    @property
    def tokenizer(self) -> ModelTokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def obeys(self) -> Collection[str]:
        """Sampling parameters, such as ``json_schema``, that the model honours without the sampler's help."""
        ...


class LanguageModel(Vocabulary, Protocol):
    """Logits of the next token, a function of the tokens before it and of the weights' version."""

    def next_logits(self, context: Sequence[int], version: str, end: int | None = None) -> FloatArray:
        """Return finite logits, shape ``[vocab_size]``, after ``context[:end]``; the caller owns the array."""
        ...
