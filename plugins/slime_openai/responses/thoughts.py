"""The number of tokens of the thoughts in an answer."""

from __future__ import annotations

from bisect import bisect_left

from router_core.types import Tokenizer
from slime_openai.requests.messages import Message
from slime_openai.responses.outputs import Output

__all__ = ["reasoning_tokens"]


def reasoning_tokens(tokenizer: Tokenizer, output: Output, reply: Message, *, skip_special: bool) -> int:
    """Return how many tokens ``output`` has up to the end of the thoughts of ``reply``. O(log tokens) decodings.

    ``skip_special``: True when the text of ``output`` leaves special tokens out.
    """
    start = output.text.find(reply.reasoning) if reply.reasoning else -1
    if start < 0 or reply.reasoning is None:
        return 0
    end = start + len(reply.reasoning)

    def length(count: int) -> int:
        return len(tokenizer.decode(output.ids[:count], skip_special_tokens=skip_special))

    return bisect_left(range(len(output.ids)), end, key=length)
