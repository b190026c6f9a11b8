"""The tokenizer of the n-gram model: a small byte-level BPE with Qwen3's markup, trained when the engine starts.

Training is deterministic: every process gets the same vocabulary from the corpus of this package. So a router may load
the tokenizer that one engine saved, and use it with another engine that runs the n-gram model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["EngineTokenizer", "corpus_documents", "train_tokenizer"]

#: Tokens that ``skip_special_tokens`` leaves out. The first two end a generation.
END_OF_TEXT, END_OF_TURN, START_OF_TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
#: Tags that are one token each. ``skip_special_tokens`` keeps them like other text, as with Qwen3's tokenizer.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_VOCAB_SIZE = 1280
_DOCUMENT_END = "\n%%\n"
#: Qwen2's pattern, which cuts text before merges are applied. A merge never crosses a cut. When the text of sampled
#: tokens is encoded again, though, a cut may fall inside the text of one of these tokens.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus_documents() -> list[str]:
    """Return the texts that ship with the package, each a story, a program, a conversation in ChatML, ..."""
    return _resource("corpus.txt").rstrip("\n").split(_DOCUMENT_END)


def _resource(name: str) -> str:
    return files("slime_engine").joinpath(name).read_text(encoding="utf-8")


def train_tokenizer(documents: Iterable[str]) -> EngineTokenizer:
    """Train a tokenizer on ``documents`` without their markup, in well under 1 s."""
    special = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
    plain = list(documents)
    for markup in (*special, *MARKUP):
        plain = [piece for text in plain for piece in text.split(markup)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - len(special) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(plain, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return EngineTokenizer(bpe)


class EngineTokenizer:
    """A ``router_core.types.Tokenizer`` that needs no transformers.

    ``token_bytes[id]`` is what a token adds to the text; a token may end inside a UTF-8 character.
    """

    def __init__(self, bpe: Tokenizer) -> None:
        self._bpe = bpe
        self.chat_template = _resource("chat_template.jinja")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(self.chat_template)
        self.vocab_size: int = bpe.get_vocab_size()
        self.special_ids = frozenset(map(self._id, (END_OF_TEXT, START_OF_TURN, END_OF_TURN)))
        self.eos_ids = frozenset(map(self._id, (END_OF_TEXT, END_OF_TURN)))
        self.pad_id = self._id(END_OF_TEXT)
        self.start_of_turn_id = self._id(START_OF_TURN)
        self.token_bytes = self._all_token_bytes()

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The inner tokenizer. Tokenizers of transformers have it under the same name."""
        return self._bpe

    def _id(self, token: str) -> int:
        return self._bpe.get_vocab()[token]

    def _all_token_bytes(self) -> list[bytes]:
        byte_of = _byte_alphabet()
        added = self._bpe.get_added_tokens_decoder()
        table = [b""] * self.vocab_size
        for text, token_id in self._bpe.get_vocab().items():
            table[token_id] = text.encode() if token_id in added else bytes(byte_of[char] for char in text)
        return table

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``; each markup tag becomes one id. Releases the GIL meanwhile."""
        (encoding,) = self._bpe.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of ``text`` with markup spelt out in ordinary tokens: ``<``, ``think``, ``>``."""
        words = self._bpe.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for word, _ in words for token in self._bpe.model.tokenize(word)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(self._bpe.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the ChatML text of a conversation, as ``transformers`` renders it from the saved files.

        Raises jinja2.TemplateError when the messages do not fit the template.
        """
        return self._template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        names = {
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [START_OF_TURN, END_OF_TURN],
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
            "chat_template": self.chat_template,
            **names,
        }
        # The ``save`` of the library tokenizers raises a bare Exception when it cannot write.
        (directory / "tokenizer.json").write_text(self._bpe.to_str(pretty=True), encoding="utf-8")
        for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _to_json(value: object) -> str:
    """Write JSON without escaping HTML, as the filter of transformers does; Jinja's own filter escapes it."""
    return json.dumps(value, ensure_ascii=False)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's ``bytes_to_unicode``)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
