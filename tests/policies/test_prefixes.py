"""The map of prefixes: what it finds, and that it is bounded: the oldest goes first, a long prefix before its start."""

from __future__ import annotations

import random
from collections import OrderedDict

from slime_policies.horizons import Horizons
from slime_policies.prefixes import Prefixes, Prompt, Use


def prompt(text: str) -> Prompt:
    return Prompt.of(b'{"text": "%s"}' % text.encode())


def add(seen: Prefixes, of: Prompt, worker: int) -> None:
    seen.add(of, seen.find(of), worker, Use(1), Horizons())


def matched(seen: Prefixes, of: Prompt) -> int:
    """Bytes of the longest known prefix."""
    nodes = seen.find(of)
    return nodes[-1].size if nodes else 0


def test_the_length_of_a_known_prefix_is_found() -> None:
    """To 256 bytes up to 8 kB, to 512 up to 64 kB, beyond to 4 kB; of shorter ones to within a half."""
    text = "".join(random.Random(1).choices("abcdef", k=100_000))
    for size in range(128, 100_000, 997):
        seen = Prefixes(1 << 20)
        add(seen, prompt(text[:size]), 1)
        found = matched(seen, prompt(text))
        step = 256 if size < 8 << 10 else 512 if size < 64 << 10 else 4096
        assert found <= size < max(2 * found, 16) + 2
        assert size - found < step + 2
        assert found == matched(seen, Prompt.of(b'{"text": "%s' % text[:size].encode()))


def test_of_a_short_prompt_the_end_counts_too() -> None:
    assert Prompt.of(b"").digests == []
    for size in (1, 15, 100):
        assert prompt("x" * size).covered == prompt("x" * size).size
        assert prompt("x" * size).digests[-1] != prompt("x" * size + "y").digests[-1]


def test_a_prefix_of_another_prompt_is_another_prefix() -> None:
    """Equal parts in other places have other digests."""
    one, two = prompt("a" * 256 + "b" * 256 + "c" * 600), prompt("d" * 256 + "b" * 256 + "c" * 600)
    assert not {*one.digests} & {*two.digests}


def test_map_knows_the_workers_and_the_number_of_requests_of_a_prefix() -> None:
    seen = Prefixes(1 << 20)
    shared = "x" * 1000
    add(seen, prompt(shared + "one" * 300), 1)
    add(seen, prompt(shared + "two" * 300), 4)
    nodes = seen.find(prompt(shared + "one" * 300))
    assert [(node.workers, node.visits, len(node.digests)) for node in nodes] == [(5, 2, 7), (1, 1, 4)]


def test_ids_have_more_bytes_a_token_than_text() -> None:
    assert Prompt.of(b'{"input_ids": [1, 2, 3]}').per_token > prompt("one two three").per_token


def test_the_megabytes_of_a_huge_prompt_are_not_all_looked_at() -> None:
    huge = prompt("x" * (3 << 20))
    assert huge.size == huge.covered == 1 << 20


def test_memory_stays_below_the_limit_and_evicts_the_oldest() -> None:
    rng = random.Random(2)
    prompts = [prompt("".join(rng.choices("abcdef", k=1600))) for _ in range(20)]
    seen = Prefixes(13_000)  # five of them: a part counts as 256 bytes at least
    for number, added in enumerate(prompts):
        add(seen, added, 1)
        add(seen, prompts[0], 1)  # used again and again
        assert seen.size <= 13_000
        kept = [matched(seen, other) == 1536 for other in prompts[: number + 1]]
        assert kept == [True] + [number - earlier < 4 for earlier in range(1, number + 1)]


def test_nodes_have_what_a_map_of_single_prefixes_has() -> None:
    """The model has an entry for each prefix. A longer one is evicted before its beginning."""
    rng = random.Random(3)
    roots = ["".join(rng.choices("abcdef", k=size)) for size in (20, 100, 700, 700, 3000)]
    seen, horizons = Prefixes(9_000), Horizons()
    model: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
    texts = [""]
    for number in range(1, 1000):
        text = rng.choice(texts[-10:]) if rng.random() < 0.5 else rng.choice(roots)
        texts.append(text[: rng.randrange(4000)] + "".join(rng.choices("abcdef", k=rng.randrange(600))))
        asked, bit = prompt(texts[-1]), 1 << rng.randrange(6)
        nodes = seen.find(asked)
        found = [(node.workers, node.visits, node.use.number) for node in nodes for _ in node.digests]
        assert found == [model[digest] for digest in asked.digests if digest in model]
        seen.add(asked, nodes, bit, Use(number), horizons)
        for digest in reversed(asked.digests):
            workers, visits, used = model.pop(digest, (0, 0, number))
            model[digest] = workers & ~horizons.evicted_by(used) | bit, visits + 1, number
        while len(model) > sum(len(node.digests) for node in seen._order):
            model.popitem(last=False)
        if rng.random() < 0.1:
            horizons.move(bit, rng.randrange(number))
        assert 0 < seen.size <= 9_000


def test_conversation_has_a_node_for_each_turn() -> None:
    """So the time of a choice grows with the turns, not with the prefixes, of which there are far more."""
    seen = Prefixes(1 << 20)
    texts = ["".join(random.Random(turn).choices("abcdef", k=20_000)) for turn in range(3)]
    for turn in range(3):
        add(seen, prompt("".join(texts[: turn + 1])), 1)
    nodes = seen.find(prompt("".join(texts)))
    assert len(nodes) == 3
    assert sum(len(node.digests) for node in nodes) > 100
