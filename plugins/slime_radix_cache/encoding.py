"""Text to token ids, without holding up the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread
import tokenizers

from router_core.types import Tokenizer

__all__ = ["Encoder"]

#: Longer texts go to a thread: about 1 ms of work, far more than the hop costs.
_LONG_TEXT = 4096


class Encoder:
    """Tokenises prompts.

    Of a tokenizer of transformers it uses a copy of the Rust one inside: transformers sets truncation and padding
    on the shared one, and only ``encode_batch_fast`` lets other threads run while it works. Any other tokenizer
    is called as it is, and has to bear calls from two threads.
    """

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> None:
        self._encode = _encoder(tokenizer)
        self._add_special_tokens = add_special_tokens

    async def encode(self, text: str, *, begins: bool) -> bytes:
        """Packed int32 ids of ``text``; ``begins`` when nothing comes before it, so that a BOS may.

        Raises what the tokenizer raises.
        """
        special = begins and self._add_special_tokens
        if len(text) < _LONG_TEXT:
            ids = self._encode(text, special)
        else:
            ids = await anyio.to_thread.run_sync(self._encode, text, special)
        return array("i", ids).tobytes()


def _encoder(tokenizer: Tokenizer) -> Callable[[str, bool], Sequence[int]]:
    rust: Any = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(rust, tokenizers.Tokenizer):
        own = tokenizers.Tokenizer.from_str(rust.to_str())
        own.no_truncation()
        own.no_padding()

        def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
            (encoding,) = own.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids

        return encode
    return lambda text, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens)
