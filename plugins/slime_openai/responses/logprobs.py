"""Logprobs in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_core.types import Tokenizer
from slime_openai.responses.outputs import Triple

__all__ = ["BROKEN", "Logprobs"]

#: The replacement character, which a decoder writes for bytes that are not a whole character.
BROKEN = "\ufffd"
#: The text of at most this many tokens is cached.
_MOST_KNOWN = 65_536


class Logprobs:
    """Makes logprobs in OpenAI's form, and caches the text of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._written: dict[int, dict[str, Any]] = {}

    def entries(
        self,
        chosen: Sequence[Triple],
        top: Sequence[Sequence[Triple] | None],
        count: int,
        *,
        as_ids: bool = False,
    ) -> list[dict[str, Any]]:
        """Return an entry for each token in ``chosen``, with its first ``count`` alternatives in ``top``.

        ``as_ids``: see ``Options.tokens_as_ids``.
        """
        entry = self._entry_of_id if as_ids else self._entry
        found = []
        for place, triple in enumerate(chosen):
            others = (top[place] if place < len(top) else None) or ()
            found.append({**entry(triple), "top_logprobs": [entry(other) for other in others[:count]]})
        return found

    def legacy(
        self,
        chosen: Sequence[Triple],
        top: Sequence[Sequence[Triple] | None],
        count: int,
        offsets: list[int],
        *,
        as_ids: bool = False,
    ) -> dict[str, Any]:
        """Return logprobs in the form of ``/v1/completions``; ``offsets``: the places of the tokens in the text."""
        entries = self.entries(chosen, top, count, as_ids=as_ids)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in entries
            ]
            if count
            else None,
            "text_offset": offsets,
        }

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a few ``tokens``."""
        if len(tokens) == 1:
            return str(self._token(tokens[0])["token"])
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _entry(self, triple: Triple) -> dict[str, Any]:
        return {**self._token(triple[1]), "logprob": triple[0]}

    def _entry_of_id(self, triple: Triple) -> dict[str, Any]:
        return {**self._entry(triple), "token": f"token_id:{triple[1]}"}

    def _token(self, token: int) -> dict[str, Any]:
        """Return the token's text and bytes. The bytes are None if the token ends or begins inside a character."""
        known = self._written.get(token)
        if known is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            known = {"token": text, "bytes": None if BROKEN in text else list(text.encode())}
            if len(self._written) < _MOST_KNOWN:
                self._written[token] = known
        return known
