"""Prompts that clients gave as ids: does the tokenizer spell their text so?"""

from __future__ import annotations

from array import array

from slime_radix_cache.encoding import Encoder
from slime_radix_cache.segments import Prompt
from slime_radix_cache.spelling import Spelling
from slime_radix_cache.text_index import text_of

__all__ = ["GivenPrompts"]


class GivenPrompts:
    """Asks the tokenizer about a prompt when another client writes its text, and remembers what it says."""

    def __init__(self, encoder: Encoder, spelling: Spelling) -> None:
        self._encoder = encoder
        self._spelling = spelling

    async def find_out(self, prompt: Prompt) -> None:
        """Note in ``prompt`` if its tokens are odd: others than the tokenizer makes of the text that they say."""
        said = self._spelling.text_of(array("i", prompt.ids))
        is_odd = not text_of(prompt.node).endswith(said.encode()) or prompt.ids != await self._encoder.encode(
            said, begins=prompt.parent is None
        )
        if prompt.giver is not None:
            prompt.giver = prompt.giver._replace(is_odd=is_odd)
