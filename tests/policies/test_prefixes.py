"""The memory of prompts is bounded: the oldest goes first, and an ending before its beginning."""

from __future__ import annotations

import random

from slime_policies.prefixes import Prompt, Seen


def prompt(text: str) -> Prompt:
    return Prompt.of(b'{"text": "%s"}' % text.encode())


def matched(seen: Seen, of: Prompt) -> int:
    """Bytes of the beginnings that are known, as far as each shorter one is."""
    size = 0
    for digest, longer in of.parts:
        if digest not in seen:
            break
        size += longer
    return size


def test_a_beginning_is_found_to_within_a_third() -> None:
    text = "".join(random.Random(1).choices("abcdef", k=100_000))
    for size in range(128, 100_000, 997):
        seen = Seen(1 << 20)
        seen.add(prompt(text[:size]))
        found = matched(seen, prompt(text))
        assert found <= size < found * 1.5 + 2
        assert found == matched(seen, prompt(text[:size]))


def test_of_less_than_128_bytes_there_is_nothing_to_know() -> None:
    assert Prompt.of(b"").parts == ()
    assert prompt("x" * 124).parts == ()
    assert [size for _, size in prompt("x" * 128).parts] == [128]


def test_the_megabytes_of_a_huge_prompt_are_not_all_looked_at() -> None:
    huge = prompt("x" * (3 << 20))
    assert huge.size == sum(size for _, size in huge.parts) == 1 << 20


def test_memory_stays_below_the_limit_and_evicts_the_oldest() -> None:
    rng = random.Random(2)
    prompts = [prompt("".join(rng.choices("abcdef", k=1600))) for _ in range(20)]
    seen = Seen(10_000)
    for number, added in enumerate(prompts):
        seen.add(added)
        seen.add(prompts[0])  # used again and again
        assert seen.size <= 10_000
        kept = [matched(seen, other) == 1536 for other in prompts[: number + 1]]
        assert kept == [True] + [number - earlier < 5 for earlier in range(1, number + 1)]


def test_an_ending_is_forgotten_before_its_beginning() -> None:
    rng = random.Random(3)
    roots = ["".join(rng.choices("abcdef", k=700)) for _ in range(5)]
    seen = Seen(6_000)
    added = []
    for _ in range(300):
        text = rng.choice(roots) + "".join(rng.choices("abcdef", k=rng.randrange(2000)))
        added.append(prompt(text))
        seen.add(added[-1])
        assert seen.size <= 6_000
        for other in added[-10:]:
            flags = [digest in seen for digest, _ in other.parts]
            assert flags == sorted(flags, reverse=True)
