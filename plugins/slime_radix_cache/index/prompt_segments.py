"""Segments of tokens: the base class of all segments, and prompts.

Each field of an object takes 8 bytes, which matters, since a turn may have few tokens. So a field that most segments do
not need is only in a subclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from slime_sglang.evidence import CONTRADICTION

if TYPE_CHECKING:
    from slime_radix_cache.index.text_node import Node

__all__ = ["ID_BYTES", "Context", "Giver", "Prompt", "Segment", "confirm", "new_prompt"]

#: A segment and how many of its tokens belong to the context; ``None`` is the empty context.
Context: TypeAlias = "tuple[Segment, int] | None"

#: Bytes of a token id.
ID_BYTES = 4
#: Number of sessions that are remembered as givers of one prompt's ids. A further session that gives these ids is not
#: remembered: for that session they are the ids of another one.
_GIVERS = 64


class Segment:
    """Tokens that entered a context in one step.

    ``kept``: how many tokens of ``parent`` precede it. ``packed``: the ids as int32, followed by the logprobs of a
    response. ``node``: the node of the text index at which its visible text ends. The other fields belong to the cache:
    ``children`` counts segments that continue it. ``older`` and ``newer`` are neighbours by age. ``generation`` is the
    number of new weight versions that had come before its last use. While contexts with this segment are pinned,
    ``generation`` is minus the number of pins. ``serial``: its number, which it keeps when it is moved to a store; 0
    without a store.
    """

    __slots__ = ("children", "generation", "kept", "newer", "node", "older", "packed", "parent", "serial")

    def __init__(self, context: Context, packed: bytes, node: Node) -> None:
        self.parent: Segment | None = context[0] if context is not None else None
        self.kept = context[1] if context is not None else 0
        self.packed = packed
        self.node = node
        self.children = self.generation = self.serial = 0
        self.older: Segment | None = None
        self.newer: Segment | None = None

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES

    @property
    def ids(self) -> bytes:
        """The token ids, packed int32. O(tokens) for a response, whose ids are copied out of ``packed``."""
        return self.packed

    @property
    def doubt(self) -> str | None:
        """The reason why records with this segment are inexact, or None."""
        return None

    @property
    def pins(self) -> int:
        """The number of pinned contexts that have this segment."""
        return -self.generation if self.generation < 0 else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed values."""
        return len(self.packed)

    @property
    def is_fact(self) -> bool:
        """False if the segment is known only from contradictory answers; then nothing continues it."""
        return True


class Giver(NamedTuple):
    """The sessions that gave the tokens of a prompt as ids. A request without a session adds no session.

    ``is_odd``: True if the tokenizer makes other tokens of the text; None until this is checked.
    """

    sessions: tuple[str, ...]
    is_odd: bool | None = None

    def with_another(self, sessions: tuple[str, ...]) -> Giver:
        """Return this giver with ``sessions`` added: they gave the same ids."""
        new = [one for one in sessions if one not in self.sessions]
        return (
            self._replace(sessions=(*self.sessions, *new)) if new and len(self.sessions) < _GIVERS else self
        )


class Prompt(Segment):
    """Tokens that the router made from text, or got from a client: loss mask 0, logprob 0.0.

    ``giver`` is None if the router made these tokens from text.
    """

    __slots__ = ("giver",)

    def __init__(self, context: Context, ids: bytes, node: Node, giver: Giver | None = None) -> None:
        super().__init__(context, ids, node)
        self.giver = giver


class DoubtedPrompt(Prompt):
    """A prompt whose first answer had the doubt ``reason``. ``reason`` is None as soon as another answer has no doubt.

    Most prompts never have a doubt, so they have no field for it.
    """

    __slots__ = ("reason",)

    def __init__(self, context: Context, ids: bytes, node: Node, giver: Giver | None, reason: str) -> None:
        super().__init__(context, ids, node, giver)
        self.reason: str | None = reason

    @property
    def doubt(self) -> str | None:
        """See :attr:`Segment.doubt`."""
        return self.reason

    @property
    def is_fact(self) -> bool:
        """See :attr:`Segment.is_fact`."""
        return self.reason is None or self.reason != CONTRADICTION


def new_prompt(context: Context, ids: bytes, node: Node, giver: Giver | None, doubt: str | None) -> Prompt:
    """Return a new prompt with this ``doubt``."""
    if doubt is None:
        return Prompt(context, ids, node, giver)
    return DoubtedPrompt(context, ids, node, giver, doubt)


def confirm(prompt: Prompt, doubt: str | None) -> None:
    """Drop the doubt of ``prompt`` if another answer to it has no ``doubt``."""
    if doubt is None and isinstance(prompt, DoubtedPrompt):
        prompt.reason = None
