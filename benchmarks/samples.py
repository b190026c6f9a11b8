"""Test data: a small tokenizer, answers in SGLang's form, conversations to continue."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

__all__ = ["Answer", "Samples", "request_body", "save_tokenizer"]

_END = "<|im_end|>"
_SPECIALS = ["<|endoftext|>", "<|im_start|>", _END]
#: A word that is in each answer, with one token for each letter. The tokenizer makes fewer tokens of the whole word.
_SPELLED = " nevertheless"


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation: the sampled ids with the end token, and the text without it."""

    text: str
    ids: list[int]
    logprobs: list[float]

    def payload(self, rid: str, prompt_tokens: int) -> dict[str, Any]:
        """Return SGLang's JSON for this answer."""
        return self._payload(rid, prompt_tokens, self.text, len(self.ids))

    def chunk(self, rid: str, prompt_tokens: int, text: str, tokens: int) -> dict[str, Any]:
        """Return SGLang's cumulative stream chunk after ``tokens`` tokens, whose text is ``text``."""
        return self._payload(rid, prompt_tokens, text, tokens)

    def _payload(self, rid: str, prompt_tokens: int, text: str, tokens: int) -> dict[str, Any]:
        ids, logprobs = self.ids[:tokens], self.logprobs[:tokens]
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "stop", "matched": ids[-1]} if tokens == len(self.ids) else None,
                "prompt_tokens": prompt_tokens,
                "weight_version": "default",
                "total_retractions": 0,
                "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)],
                "completion_tokens": tokens,
                "cached_tokens": 0,
                "e2e_latency": 0.6180339887498949,
            },
        }


class Samples:
    """Texts and answers for one tokenizer, from a fixed seed: they are the same in every run."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 1) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._prose = _prose()
        [self._end_id] = tokenizer.encode(_END).ids
        self.spelled_ids: list[int] = [token for letter in _SPELLED for token in tokenizer.encode(letter).ids]

    def words(self, tokens: int) -> str:
        """Return English text of about ``tokens`` tokens."""
        start = self._random.randrange(len(self._prose) - 8 * tokens)
        text = self._prose[start : start + 8 * tokens]
        offsets: list[tuple[int, int]] = self._tokenizer.encode(text).offsets
        return text[: offsets[tokens - 1][1]].strip()

    def answer(self, tokens: int) -> Answer:
        """Return an answer of ``tokens`` tokens: prose, a word spelled letter by letter, prose, the end token."""
        prose = self._tokenizer.encode(self.words(2 * tokens)).ids
        first = (tokens - 1 - len(self.spelled_ids)) // 2
        rest = tokens - 1 - len(self.spelled_ids) - first
        ids = [*prose[:first], *self.spelled_ids, *prose[first : first + rest], self._end_id]
        return Answer(self.decode(ids[:-1]), ids, [self._logprob() for _ in ids])

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def opening(self, tokens: int) -> str:
        """Return a system prompt and a first question in ChatML, up to the assistant's turn."""
        return f"<|im_start|>system\n{self.words(tokens // 2)}{_END}\n" + self.question(
            self.words(tokens // 2)
        )

    def question(self, text: str) -> str:
        """Return a user's turn and the assistant's header."""
        return f"<|im_start|>user\n{text}{_END}\n<|im_start|>assistant\n"

    def following(self, history: str, answer: str, question: str) -> str:
        """Return ``history`` with an answer, the end token and the next question, as a chat template writes them."""
        return f"{history}{answer}{_END}\n{self.question(question)}"

    def _logprob(self) -> float:
        """Return a float32 with the digits of a double, as engines print logprobs."""
        return float(np.float32(-self._random.expovariate(2.0)))


def request_body(text: str, max_new_tokens: int, *, stream: bool = False, rid: str | None = None) -> bytes:
    """Return a ``/generate`` request as rollout code sends it: text, sampling parameters, logprobs wanted."""
    body: dict[str, object] = {
        "text": text,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": max_new_tokens,
        },
        "return_logprob": True,
        "stream": stream,
    }
    if rid is not None:
        body["rid"] = rid
    return json.dumps(body, separators=(",", ":")).encode()


def save_tokenizer(directory: Path, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocabulary`` tokens, and save it to ``directory``, for transformers.

    The tokenizer has ChatML's special tokens. The training text is the language reference that comes with Python.
    Training takes about a second.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.topics.values(), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _SPECIALS[0]}
        )
    )
    return tokenizer


def _prose() -> str:
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    return " ".join(re.sub(r"[^A-Za-z0-9.,;:?!]+", " ", text).split())
