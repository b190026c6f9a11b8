"""Tokenizers of transformers as the engine needs them: with the bytes of each token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["HFTokenizer"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PROBE = "Grüße, 日本 👋 1234\n\tdef f(x):\r\n  return 'it''s'"


class HFTokenizer:
    """The tokenizer in ``directory``. ``vocab_size`` is the model's, which may have more ids than the tokenizer.

    Raises ValueError if no token ends a generation, or if the bytes of the tokens are unknown. They are known if the
    tokens are in GPT-2's byte alphabet, or are SentencePiece's pieces and byte tokens. A sample text is used to check
    them.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        self._inner: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        added = self._inner.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special | set(self._inner.all_special_ids))
        own = self._inner.eos_token_id
        self.eos_ids = frozenset(eos_ids) or frozenset(() if own is None else (own,))
        if not self.eos_ids:
            raise ValueError(
                f"the checkpoint {directory} names no token that ends a generation (eos_token_id)"
            )
        texts = {token_id: token.content for token_id, token in added.items()}
        self.token_bytes = self._all_token_bytes(vocab_size, texts)
        self._check(directory)

    def _all_token_bytes(self, vocab_size: int, added: Mapping[int, str]) -> list[bytes]:
        vocabulary: dict[str, int] = self._inner.get_vocab()
        alphabet: Any = bytes_to_unicode  # it has no annotations
        byte_of: dict[str, int] = {char: byte for byte, char in alphabet().items()}
        is_sentence_piece = any("▁" in piece for piece in vocabulary)
        table = [b""] * max(vocab_size, max(vocabulary.values()) + 1)
        for piece, token_id in vocabulary.items():
            if token_id in added:
                table[token_id] = added[token_id].encode()
            elif is_sentence_piece:
                byte = _BYTE.fullmatch(piece)
                table[token_id] = bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
            elif all(char in byte_of for char in piece):
                table[token_id] = bytes(byte_of[char] for char in piece)
            else:
                raise ValueError(
                    f"token {token_id} of the tokenizer, {piece!r}, is not in GPT-2's byte alphabet"
                )
        return table

    def _check(self, directory: Path) -> None:
        ids = self.encode(_PROBE)
        text = b"".join(self.token_bytes[token_id] for token_id in ids).decode("utf-8", "replace")
        decoded = self.decode(ids)
        if text.removeprefix(" ") != decoded.removeprefix(" "):
            raise ValueError(
                f"the bytes of the tokens in {directory} are unknown: "
                f"they give {text!r}, but the tokenizer decodes them to {decoded!r}"
            )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(
            self._inner.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation. Raises jinja2.TemplateError, also when the tokenizer has no template."""
        if not self._inner.chat_template:
            raise TemplateError(
                "the model's tokenizer has no chat template; use /generate or /v1/completions"
            )
        return str(
            self._inner.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads."""
        self._inner.save_pretrained(str(directory))
