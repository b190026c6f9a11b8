"""Sessions at random, without a router, and pictures of all that was recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from radix_cache.toy import EOS, encode, pack, sampled, spell
from slime_radix_cache.index.segments import Response, Segment, context_ids, links
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["Rollouts", "picture", "told"]

WORDS = [1, 2, 3, 4, 5, 6, 7, 8]


class Rollouts:
    """Sessions that speak, cut, fork, and say the same again, at random."""

    def __init__(self, kept: Trajectories, seed: int) -> None:
        self.kept = kept
        self._random = random.Random(seed)
        self.texts: list[str] = []
        self._versions = count(1)

    def step(self) -> None:
        kind = self._random.random()
        if kind < 0.04:
            self.kept.see_version(str(next(self._versions)))
        elif kind < 0.06:
            self.kept.see_version(self._random.choice(["default", "7"]))
        else:
            response = self.turn()
            if kind > 0.9:
                self.kept.withdraw(response)

    def turn(self, session: str | None = "") -> Response:
        """One of ``session``, "" for any."""
        some = self._random
        text = some.choice([*self.texts[-20:], "", "ab"])
        text = text[: some.randint(0, len(text))] if some.random() < 0.2 else text
        text += spell(some.choices(WORDS, k=some.randint(text == "", 4)))
        any_session = some.choice(["one", "two", f"s{len(self.texts) // 10}", None])
        session = any_session if session == "" else session
        answer = some.choices(WORDS, k=some.randint(1, 6)) + [EOS] * (some.random() < 0.5)
        match = self.kept.find_to_continue(text.encode(), session)
        rest = pack(*encode(text.encode()[match.position :].decode()))
        self.kept.pin(match.context)
        version = some.choice([None, "1", "2", "3"])
        response = self.kept.record(
            match.context, rest, text.encode(), sampled(*answer, version=version), session
        )
        self.kept.unpin(match.context)
        self.texts.append(text + spell(answer[: response.visible]))
        return response


def told(segment: Segment) -> Any:
    """All that is known of ``segment``."""
    chain = [
        (type(one).__name__, one.ids, length, text_of(one.node))
        for one, length in links((segment, len(segment)))
    ]
    if not isinstance(segment, Response):
        return chain
    return (
        chain, segment.start, segment.visible, segment.logprobs, segment.versions, segment.session,
        segment.finish_reason, text_of(segment.end), segment.continuation_lost, segment.doubt, segment.adapter,
    )  # fmt: skip


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for kid in node.all_kids:
        yield from nodes(kid)


def picture(kept: Trajectories) -> dict[str, Any]:
    """Everything that an answer may depend on."""
    index = kept._index
    sessions = {name: kept.responses_of(name) for name in kept._sessions._responses}
    return {
        "texts": sorted(
            (
                text_of(node),
                [told(one) for one in node.ends],
                [told(one) for one in node.begins],
                [told(one) for one in node.through],
            )
            for node in nodes(index.root)
        ),
        "sessions": {name: [told(one) for one in said] for name, said in sorted(sessions.items())},
        "incomplete": {name for name in sessions if kept.has_lost(name)},
        "versions": kept._versions.ordered,
        "sizes": (kept.segments, kept.tokens, kept.size_bytes, index.nodes),
        "starts": sorted(
            (context_ids((one, len(one))), place)
            for said in sessions.values()
            for one in said
            for _, place in kept._starts.along(context_ids((one, len(one))))
        ),
    }
