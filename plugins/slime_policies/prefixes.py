"""Prefixes of prompts, and the workers that were sent them. Such a worker probably has the prefix in its cache.

A tree of characters, as in the SGLang gateway, would take Python longer than the rest of a request. Here a prompt is
the bytes of the body after the prompt's key, such as ``"text":``, and nothing is parsed. Some prefixes have a digest:
the prefixes of 16, 32, 64, 128 and 256 bytes, then one every 256 bytes up to 8 KiB, every 512 bytes up to 64 KiB, and
every 4,096 bytes up to 1 MiB. A prompt of less than 256 bytes has a digest of its whole length, too. One map leads from
each digest to a node. A node has consecutive prefixes that the same requests had, such as those of one turn of a
conversation. A node holds its workers as bits of one number, so a lookup does not take longer with more workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from slime_policies.horizons import Horizons
from slime_policies.prompt_key import find_prompt

__all__ = ["Node", "Prefixes", "Prompt", "Use"]

#: Without a key, the prompt begins after the first comma of the body. If this many bytes at the beginning of the body
#: have no comma, the prompt begins where the body begins.
_COMMA_WITHIN = 4096
#: No more than this many bytes of a prompt are hashed. To hash so many takes 0.6 ms.
_MAX_BYTES = 1 << 20
#: In the size of the map, a prefix counts as the bytes by which it is longer than the next shorter prefix. It counts as
#: this many bytes at least, since its entry takes memory, too.
_LEAST_BYTES = 256


def _cuts() -> Iterator[int]:
    yield from (16, 32, 64, 128)
    yield from range(256, 8 << 10, 256)
    yield from range(8 << 10, 64 << 10, 512)
    yield from range(64 << 10, _MAX_BYTES + 1, 4096)


_CUTS = tuple(_cuts())
#: The bytes between each prefix and the next longer prefix.
_SPANS = tuple(slice(begin, end) for begin, end in pairwise((0, *_CUTS)))
#: The size in the map of the first 0, 1, 2 ... prefixes of a prompt together.
_COUNTED = (0, *accumulate(max(end - begin, _LEAST_BYTES) for begin, end in pairwise((0, *_CUTS))))


class Prompt(NamedTuple):
    """Prefixes of one prompt, the shortest first.

    ``digests``: one for each prefix. ``covered``: bytes of the longest prefix. ``size``: bytes of the prompt, 1 MiB at
    most; what follows the prompt in the body is counted too. ``per_token``: mean bytes of a token. ``start``: the place
    of the prompt in the body, or None if no key was found.
    """

    digests: list[int]
    covered: int
    size: int
    per_token: int
    start: int | None

    @classmethod
    def of(cls, body: bytes) -> Prompt:
        """Return the prompt in the ``body`` of a request. O(size), at 2 GB/s; up to 0.3 us for each prefix."""
        start, per_token = find_prompt(body)
        # Without a key, the first field is left out, since it may be the request's own id.
        begin = start if start is not None else body.find(b",", 0, _COMMA_WITHIN) + 1
        prompt = body[begin : begin + _MAX_BYTES]
        size = len(prompt)
        count = bisect_right(_CUTS, size)
        digest = 0
        # SipHash, with another key in each process.
        digests = [digest := hash((digest, prompt[span])) for span in _SPANS[:count]]
        covered = _CUTS[count - 1] if count else 0
        if covered < size < 2 * _CUTS[3]:  # the end of a short prompt counts, too
            digests.append(hash((digest, prompt[covered:])))
            covered = size
        return cls(digests, covered, size, per_token, start)


@dataclass(slots=True)
class Use:
    """The use of a prompt by choice ``number``. ``is_answered``: the worker has answered, so it computed the prompt."""

    number: int
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """The state of consecutive prefixes that the same requests had.

    ``first``: the index of the node's shortest prefix among all prefixes of a prompt. ``digests``: one for each prefix,
    the shortest first. ``size``: bytes of the longest prefix. ``workers``: the workers that were sent the prefixes, as
    bits. ``visits``: the number of requests that had the prefixes. ``use``: the last use of the prefixes.
    """

    first: int
    digests: list[int]
    size: int
    workers: int
    visits: int
    use: Use


class Prefixes:
    """Prefixes of prompts that workers were sent, at most ``limit`` bytes of them in all.

    The least recently used node loses its prefixes first, the longest of them before the others. A prefix counts as the
    bytes by which it is longer than the next shorter prefix, but as 256 bytes at least.
    """

    __slots__ = ("_limit", "_nodes", "_order", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nodes: dict[int, Node] = {}  # by digest
        #: The least recently used first. A node stands after all nodes with longer prefixes of the same prompts.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self.size = 0

    def find(self, prompt: Prompt) -> list[Node]:
        """Return the nodes of the known prefixes of ``prompt``, the shortest first.

        The last node is split if the prompt has only some of its prefixes. Call :meth:`add` next: a split puts the new
        node last in the order of use, and :meth:`add` corrects the order.
        """
        nodes = []
        for node in dict.fromkeys(map(self._nodes.get, prompt.digests)):  # each node once, in C
            if node is None:
                break
            nodes.append(node)
        if nodes:
            last = nodes[-1]
            shared = prompt.digests[last.first : last.first + len(last.digests)]
            if shared != last.digests:
                # A digest depends on all bytes before it, so all digests after the first different one differ.
                shared = [one for one, other in zip(shared, last.digests, strict=False) if one == other]
                nodes[-1] = self._split(last, len(shared))
        return nodes

    def add(self, prompt: Prompt, nodes: Sequence[Node], worker: int, use: Use, horizons: Horizons) -> None:
        """Record that a worker, given as a bit, gets ``prompt``.

        Also remove, from the workers of each known prefix, those that count as having evicted the prefix.

        ``nodes``: the known prefixes, as :meth:`find` has just returned them.
        """
        known = nodes[-1].first + len(nodes[-1].digests) if nodes else 0
        if new := prompt.digests[known:]:
            node = Node(known, new, prompt.covered, worker, 1, use)
            self._nodes.update(dict.fromkeys(new, node))
            self._order[node] = None
            self.size += _COUNTED[known + len(new)] - _COUNTED[known]
        for node in reversed(nodes):
            self._order.move_to_end(node)
            evicted = horizons.evicted_by(node.use.number)
            node.workers = node.workers & ~evicted | worker
            node.use = use
            node.visits += 1
        while self.size > self._limit:
            self._evict(next(iter(self._order)))

    def _split(self, node: Node, count: int) -> Node:
        """Move the first ``count`` prefixes of ``node`` to a new node, and return the new node."""
        new = Node(
            node.first,
            node.digests[:count],
            _CUTS[node.first + count - 1],
            node.workers,
            node.visits,
            node.use,
        )
        self._nodes.update(dict.fromkeys(new.digests, new))
        self._order[new] = None
        node.first += count
        node.digests = node.digests[count:]
        return new

    def _evict(self, node: Node) -> None:
        """Forget the longest prefix of ``node``."""
        del self._nodes[node.digests.pop()]
        count = node.first + len(node.digests)
        self.size -= _COUNTED[count + 1] - _COUNTED[count]
        if node.digests:
            node.size = _CUTS[count - 1]
        else:
            del self._order[node]

    def clear(self) -> None:
        """Forget all."""
        self._nodes.clear()
        self._order.clear()
        self.size = 0
