"""Comparison of ids that clients gave as prompts with the ids that the tokenizer makes of the same text."""

from __future__ import annotations

from collections.abc import Sequence

from slime_radix_cache.index.segments import Prompt, Segment
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.tokens.encoding import Encoder
from slime_radix_cache.tokens.spelling import Spelling

__all__ = ["GivenPrompts"]


class GivenPrompts:
    """Compares the ids of a prompt that was given as ids with the tokenizer's ids for the same text.

    This is done when a text of another session, or of no session, first leads to this prompt.
    """

    def __init__(self, encoder: Encoder, spelling: Spelling) -> None:
        self._encoder = encoder
        self._spelling = spelling

    async def find_out_all(
        self, prompts: Sequence[Prompt], trajectories: Trajectories, client: str | None = None
    ) -> None:
        """Call :meth:`find_out` for each of ``prompts``, and keep them in memory meanwhile."""
        held = prompts if trajectories.demotion is not None else ()
        for prompt in held:
            trajectories.pin((prompt, len(prompt)))
        try:
            for prompt in prompts:
                await self.find_out(prompt, client)
        finally:
            for prompt in held:
                trajectories.unpin((prompt, len(prompt)))

    async def find_out(self, prompt: Prompt, client: str | None = None) -> None:
        """Set ``is_odd`` in the giver of ``prompt``: True if the tokenizer makes other tokens of the prompt's text."""
        ids, begins = _up_to(prompt)
        spelt = await self._encoder.text_of(self._spelling, ids, client)
        is_odd = not text_of(prompt.node).endswith(spelt.encode()) or ids != await self._encoder.encode(
            spelt, begins=begins, client=client
        )
        if prompt.giver is not None:
            prompt.giver = prompt.giver._replace(is_odd=is_odd)


def _up_to(prompt: Prompt) -> tuple[bytes, bool]:
    """Return the packed ids of ``prompt`` and of the prompts right before it, and True if nothing precedes them.

    Given ids may continue an earlier prompt. The tokenizer would encode both as one text, so both are compared.
    """
    parts = [prompt.ids]
    here: Segment = prompt
    while isinstance(here.parent, Prompt):
        parts.append(here.parent.packed[: 4 * here.kept])
        here = here.parent
    return b"".join(reversed(parts)), here.parent is None
