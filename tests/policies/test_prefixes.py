"""The map of prefixes: what it finds, and that it is bounded: the oldest goes first, a long prefix before its start."""

from __future__ import annotations

import random

from slime_policies.horizons import Horizons
from slime_policies.prefixes import Prefixes, Prompt, Use


def prompt(text: str) -> Prompt:
    return Prompt.of(b'{"text": "%s"}' % text.encode())


def add(seen: Prefixes, of: Prompt, worker: int) -> None:
    seen.add(of, worker, Use(1), Horizons())


def matched(seen: Prefixes, of: Prompt) -> int:
    """Bytes of the beginnings that are known, as far as each shorter one is."""
    size = 0
    for digest, longer in of.parts:
        if seen.get(digest) is None:
            break
        size += longer
    return size


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
    assert Prompt.of(b"").parts == ()
    for size in (1, 15, 100):
        assert sum(more for _, more in prompt("x" * size).parts) == prompt("x" * size).size
        assert prompt("x" * size).parts[-1] != prompt("x" * size + "y").parts[-1]


def test_a_prefix_of_another_prompt_is_another_prefix() -> None:
    """Equal parts in other places have other digests."""
    one, two = prompt("a" * 256 + "b" * 256 + "c" * 600), prompt("d" * 256 + "b" * 256 + "c" * 600)
    assert not {digest for digest, _ in one.parts} & {digest for digest, _ in two.parts}


def test_the_map_knows_which_workers_have_a_prefix_and_how_many_requests_had_it() -> None:
    seen = Prefixes(1 << 20)
    shared = "x" * 1000
    add(seen, prompt(shared + "one" * 300), 1)
    add(seen, prompt(shared + "two" * 300), 4)
    states = [seen.get(digest) for digest, _ in prompt(shared + "one" * 300).parts]
    assert all(state is not None for state in states)
    assert [(state.workers, state.visits) for state in states if state is not None] == [
        *[(5, 2)] * 7, *[(1, 1)] * (len(states) - 7)
    ]  # fmt: skip


def test_ids_have_more_bytes_a_token_than_text() -> None:
    assert Prompt.of(b'{"input_ids": [1, 2, 3]}').per_token > prompt("one two three").per_token


def test_the_megabytes_of_a_huge_prompt_are_not_all_looked_at() -> None:
    huge = prompt("x" * (3 << 20))
    assert huge.size == sum(size for _, size in huge.parts) == 1 << 20


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


def test_an_ending_is_forgotten_before_its_beginning() -> None:
    rng = random.Random(3)
    roots = ["".join(rng.choices("abcdef", k=700)) for _ in range(5)]
    seen = Prefixes(6_000)
    added = []
    for _ in range(300):
        text = rng.choice(roots) + "".join(rng.choices("abcdef", k=rng.randrange(2000)))
        added.append(prompt(text))
        add(seen, added[-1], 1)
        assert seen.size <= 6_000
        for other in added[-10:]:
            flags = [seen.get(digest) is not None for digest, _ in other.parts]
            assert flags == sorted(flags, reverse=True)
