"""Tokenizers of every kind, small ones trained here and real ones out of ordinary packages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from radix_cache.machine.rollouts import CHATML, Markup
from slime_engine.tokenizer import corpus_documents

__all__ = ["VOCABULARIES", "Vocabulary"]

_ALL = os.environ.get("SLIME_ROUTER_VOCABULARIES") == "all"
#: Number of Qwen's 151,643 tokens that are used by default.
_FIRST_TOKENS = 30_000

#: Texts that each of the small vocabularies has to be able to say.
_MORE = [
    "Hello World  one\n\n\ttwo; isn't it , or . ?",
    "naïve Ångström x² ﬁ ①",
    "日本語 😀 ☔ Ω≈ç é",
    "def f(x):\n    return [x]",
]

_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SENTENCE_PIECE_SPECIAL = ("<unk>", "<s>", "</s>")
_LLAMA3_WORDS = _QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

LLAMA3 = Markup(
    "<|start_header_id|>system<|end_header_id|>\n\nYou help. ☔<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
LLAMA2 = Markup("<<SYS>> You help. ☔ <</SYS>>\n", "[INST] {} [/INST]", "</s>", ("<s>", "</s>"))
MISTRAL = Markup("[INST] You help. ☔ [/INST]", "[INST] {} [/INST]", "</s>", ("[INST]", "[/INST]", "</s>"))


@dataclass(frozen=True)
class Vocabulary:
    """A kind of tokenizer: how to make it, the markup of its conversations, whether it keeps what a text says."""

    name: str
    build: Callable[[], Any]
    markup: Markup
    trusted: bool = True
    real: bool = False

    def make(self, directory: Path) -> tuple[Any, str]:
        """The tokenizer, and the checkpoint to load it from."""
        tokenizer = self.build()
        tokenizer.save_pretrained(directory)
        return tokenizer, str(directory)


def _corpus() -> list[str]:
    return corpus_documents() + _MORE * 3


def _wrapped(rust: Tokenizer, **names: Any) -> Any:
    wrapper: Any = PreTrainedTokenizerFast  # its annotations are wider than what it does, or missing
    return wrapper(tokenizer_object=rust, clean_up_tokenization_spaces=False, **names)


def _special(rust: Tokenizer, *texts: str) -> None:
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])


def _byte_level(words: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    if normalizer is not None:
        bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    )
    return bpe


def _qwen() -> Any:
    bpe = _byte_level(_QWEN_WORDS, normalizers.NFC())
    _special(bpe, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    bpe.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return _wrapped(bpe, eos_token="<|im_end|>")


def _llama3() -> Any:
    bpe = _byte_level(_LLAMA3_WORDS)
    _special(bpe, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    begin = bpe.token_to_id("<|begin_of_text|>")
    bpe.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", begin)],
    )
    return _wrapped(bpe, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def _prefixed_bytes() -> Any:
    """GPT-2's family with ``add_prefix_space``."""
    bpe = _byte_level(_QWEN_WORDS)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    _special(bpe, "<|im_start|>", "<|im_end|>")
    return _wrapped(bpe, eos_token="<|im_end|>")


def _llama2(legacy: bool) -> Any:
    """SentencePiece's way: spaces are part of words, and what no piece says is said in bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    ascii_only = (text.replace("\n", " ") for text in _corpus() if text.isascii())
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=700, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    numbered = enumerate(dict.fromkeys([*_SENTENCE_PIECE_SPECIAL, *fallback, *pieces]))
    return _metaspace(
        {piece: number for number, piece in numbered}, [tuple(pair) for pair in model["merges"]], (), legacy
    )


def _metaspace(
    vocab: dict[str, int], merges: list[tuple[str, str]], special: Sequence[str], legacy: bool
) -> Any:
    """As transformers converts Llama 2: a space before every piece of text (legacy), or before the first."""
    bpe = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(content=" ", left=1)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    _special(bpe, *_SENTENCE_PIECE_SPECIAL, *special)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _wrapped(bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _word_piece() -> Any:
    """BERT: lower case, accents off, no spaces, unknown words."""
    rust = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    rust.train_from_iterator(
        _corpus(), trainers.WordPieceTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    )
    return _wrapped(rust, unk_token="[UNK]", sep_token="[SEP]", cls_token="[CLS]")


def _unigram() -> Any:
    """T5: NFKC, runs of spaces collapsed, no byte fallback."""
    rust = Tokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.train_from_iterator(
        _corpus(),
        trainers.UnigramTrainer(
            vocab_size=800, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return _wrapped(rust, unk_token="<unk>", eos_token="</s>")


def _packaged(package: str) -> Path:
    """The directory of ``package``, which is an extra of the tests."""
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[tokenizers]'")
    return Path(found.origin).parent


def _dashscope() -> Any:
    """Qwen's own vocabulary, by default only its first tokens: most of the time goes by the number of tokens."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokens = (_packaged("dashscope") / "resources" / "qwen.tiktoken").read_bytes().splitlines(keepends=True)
    _packaged("tiktoken")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    converter: Any = TikTokenConverter
    with NamedTemporaryFile(suffix=".tiktoken") as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken would keep a copy of the file
        # A token is merged out of tokens before it, so the first tokens are a vocabulary, too.
        file.writelines(tokens if _ALL else tokens[:_FIRST_TOKENS])
        file.flush()
        rust = converter(file.name, pattern=_QWEN_WORDS, extra_special_tokens=special).converted()
    rust.normalizer = normalizers.NFC()
    return _wrapped(rust, eos_token="<|im_end|>")


def _tekken() -> Any:
    """Mistral NeMo's."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    file = _packaged("mistral_common") / "data" / "tekken_240911.json"
    return _wrapped(MistralConverter(str(file)).converted(), bos_token="<s>", eos_token="</s>")


def _mistral_7b(legacy: bool) -> Any:
    """Mistral 7B's SentencePiece model, with or without the legacy of Llama 2's conversion."""
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    file = _packaged("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    _packaged("sentencepiece")
    found: Any = SentencePieceExtractor(str(file)).extract(models.BPE)
    control = [token.content for token in found["additional_special_tokens"]]
    return _metaspace(found["vocab"], found["merges"], control, legacy)


VOCABULARIES = [
    Vocabulary("qwen", _qwen, CHATML),
    Vocabulary("llama3", _llama3, LLAMA3),
    Vocabulary("gpt2-prefixed", _prefixed_bytes, CHATML),
    Vocabulary("llama2-legacy", partial(_llama2, True), LLAMA2),
    Vocabulary("llama2", partial(_llama2, False), LLAMA2),
    Vocabulary("wordpiece", _word_piece, CHATML, trusted=False),
    Vocabulary("unigram", _unigram, CHATML, trusted=False),
    Vocabulary("dashscope-qwen", _dashscope, CHATML, real=True),
]
if _ALL:
    VOCABULARIES += [
        Vocabulary("mistral-tekken", _tekken, MISTRAL, real=True),
        Vocabulary("mistral-7b-legacy", partial(_mistral_7b, True), MISTRAL, real=True),
        Vocabulary("mistral-7b", partial(_mistral_7b, False), MISTRAL, real=True),
    ]
