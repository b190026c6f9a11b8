"""Grammars that constrain an answer, compiled by llguidance, one of SGLang's grammar backends.

The sampling parameters ``json_schema``, ``regex`` and ``ebnf`` give a grammar. A token may be sampled if the grammar
allows the text that it adds. A token that ends the answer is allowed only when the text is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slime_engine.errors import BadRequest
from slime_engine.language import ModelTokenizer

__all__ = ["Bound", "Grammar", "GrammarKind", "Grammars"]

GrammarKind = Literal["json_schema", "regex", "ebnf"]
#: The language of the grammar, and its text.
Grammar = tuple[GrammarKind, str]
BoolArray = npt.NDArray[np.bool_]

#: SGLang's word for any JSON.
_ANY = "$$ANY$$"
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CACHED_GRAMMARS = 64
_MISSING = (
    "{kind} needs the library llguidance, which is not installed beside the embedded engine:"
    " pip install 'slime-router[grammar]'."
)


class Bound:
    """The grammar state of one answer."""

    def __init__(self, matcher: Any, closing_tokens: _ClosingTokens, *, is_json: bool) -> None:
        self._matcher = matcher
        self._closing_tokens = closing_tokens
        self._is_json = is_json

    def allowed(self, *, closing: bool) -> BoolArray:
        """Return, by token id, whether the token may come next. At least one token may come next.

        ``closing``: allow only tokens that end the answer or close something in it, if the grammar allows any of
        these. A tiny language model rarely ends strings and lists by itself.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._closing_tokens.size, bitorder="little").astype(np.bool_)
        return self._closing_tokens.closing(allowed, is_json=self._is_json) if closing else allowed

    def advance(self, token_id: int) -> None:
        """Advance by the sampled ``token_id``."""
        self._matcher.consume_token(token_id)

    def fits(self, token_ids: Sequence[int]) -> bool:
        """Return True when the grammar accepts all of ``token_ids``, one after the other, from here."""
        return bool(self._matcher.validate_tokens(list(token_ids)) == len(token_ids))


class Grammars:
    """Compiles grammars over one tokenizer. llguidance is imported when the first grammar is compiled."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._closing_tokens = _ClosingTokens(tokenizer)
        self._vocabulary: Any = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def bind(self, grammar: Grammar) -> Bound:
        """Return the state of a new answer under ``grammar``. The first use of a grammar compiles it, in milliseconds.

        Raises BadRequest.
        """
        return Bound(
            self._compiled(grammar).deep_copy(), self._closing_tokens, is_json=grammar[0] == "json_schema"
        )

    def _compile(self, grammar: Grammar) -> Any:
        kind, text = grammar
        try:
            import llguidance  # an extra
        except ImportError:
            raise BadRequest(_MISSING.format(kind=kind)) from None
        with self._lock:
            if self._vocabulary is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
                self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=sorted(self._tokenizer.eos_ids))
        try:
            if kind == "json_schema":
                schema = "{}" if text == _ANY else text
                written = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
            else:
                written = llguidance.grammar_from(kind, text)
            matcher = llguidance.LLMatcher(self._vocabulary, written, log_level=0)
            trouble = matcher.get_error()
        except ValueError as error:
            trouble = str(error)
        if trouble:
            raise BadRequest(f"Failed to compile {kind} grammar: {trouble.strip()}")
        return matcher


class _Vocabulary:
    """A tokenizer for llguidance.TokenizerWrapper. Special tokens begin with 0xFF, a byte that UTF-8 never has."""

    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids)
        special = tokenizer.special_ids
        self.tokens = [b"\xff" + t if i in special else t for i, t in enumerate(tokenizer.token_bytes)]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return list(self._encode(text.decode("utf-8", "replace")))


class _ClosingTokens:
    """The tokens that end an answer, and the tokens that close something in JSON."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        texts = [b"" if i in tokenizer.special_ids else t for i, t in enumerate(tokenizer.token_bytes)]
        self.size = len(texts)
        self._eos = self._among(tokenizer.eos_ids)
        self._quote = self._among(i for i, text in enumerate(texts) if text == b'"')
        self._bracket = self._among(i for i, text in enumerate(texts) if text in (b"]", b"}"))
        self._letter = self._among(i for i, text in enumerate(texts) if text == b"z")

    def _among(self, ids: Any) -> BoolArray:
        found = np.zeros(self.size, np.bool_)
        found[list(ids)] = True
        return found

    def closing(self, allowed: BoolArray, *, is_json: bool) -> BoolArray:
        """Return the tokens of ``allowed`` that end the answer, else those that close something, else ``allowed``."""
        ways = [self._eos]
        if is_json:  # no JSON value begins with z, so z is allowed only within strings
            within_string = bool((allowed & self._letter).any())
            ways += [self._quote] if within_string else [self._bracket, self._quote]
        return next((allowed & way for way in ways if (allowed & way).any()), allowed)
