"""Small byte-level BPEs with the special tokens of real models, as transformers and the embedded engine have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slime_engine.tokenizer import corpus_documents

__all__ = ["ChatTokenizer", "MarkupTokens"]

_VOCAB_SIZE = 900
#: As Qwen and GPT-4 cut text into words.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class MarkupTokens:
    """The tokens that stand for themselves: ``special`` ones are left out of an answer's text, ``plain`` ones are text.

    ``ends``: the special tokens that end a generation, the usual one first. ``begin``: what a tokenizer that adds
    special tokens puts before a text. ``digits``: how many of them make a word.
    """

    special: tuple[str, ...]
    plain: tuple[str, ...]
    ends: tuple[str, ...]
    begin: str | None = None
    digits: int = 1


def _corpus() -> list[str]:
    """Lines without markup, which would be learnt as ordinary text; and the JSON of tools and calls."""
    lines = [line for text in corpus_documents() for line in text.splitlines() if "<" not in line]
    for city in ("Zürich", "São Paulo", "東京", "Oslo"):
        arguments = {
            "city": city,
            "days": 3,
            "units": "metric",
            "exact": True,
            "tags": ["a", "b"],
            "at": None,
        }
        call = {"name": "weather", "arguments": arguments}
        lines += [json.dumps(call), json.dumps(call, ensure_ascii=False), json.dumps(call, indent=2)]
        lines.append(
            json.dumps({"type": "function", "function": {"name": "weather", "description": "The weather."}})
        )
    return lines


def _train(digits: int) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_corpus(), trainer)
    return bpe


class ChatTokenizer:
    """Fits the engine's ``ModelTokenizer``; ``huggingface`` is the same for transformers."""

    def __init__(self, markup: MarkupTokens, template: str) -> None:
        bpe = _train(markup.digits)
        bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markup.special])
        bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup.plain])
        if markup.begin is not None:
            bpe.post_processor = processors.TemplateProcessing(
                single=f"{markup.begin} $A",
                pair=f"{markup.begin} $A {markup.begin} $B",
                special_tokens=[(markup.begin, bpe.token_to_id(markup.begin))],
            )
        wrapper: Any = PreTrainedTokenizerFast  # its annotations are wider than what it does, or missing
        self.huggingface = wrapper(
            tokenizer_object=bpe,
            clean_up_tokenization_spaces=False,
            bos_token=markup.begin,
            eos_token=markup.ends[0],
            chat_template=template,
        )
        ids: dict[str, int] = bpe.get_vocab()
        self.special_ids = frozenset(ids[text] for text in markup.special)
        self.eos_ids = frozenset(ids[text] for text in markup.ends)
        self.token_bytes = _token_bytes(bpe)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; markup written in it becomes one id."""
        ids: list[int] = self.huggingface.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(self.huggingface.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Text of a conversation. Raises what the template raises."""
        return str(
            self.huggingface.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        )

    def save(self, directory: Path) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained(directory)`` reads."""
        self.huggingface.save_pretrained(directory)


def _token_bytes(bpe: Tokenizer) -> list[bytes]:
    alphabet: Any = bytes_to_unicode  # it has no annotations
    byte_of = {char: byte for byte, char in alphabet().items()}
    added = bpe.get_added_tokens_decoder()
    table = [b""] * bpe.get_vocab_size()
    for text, token_id in bpe.get_vocab().items():
        table[token_id] = text.encode() if token_id in added else bytes(byte_of[char] for char in text)
    return table
