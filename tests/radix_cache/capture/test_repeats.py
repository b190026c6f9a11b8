"""Events of a cumulative stream that do not repeat the ones before them are seen."""

from __future__ import annotations

import pytest

from slime_radix_cache.capture.repeats import RepeatedEvents


def _event(ids: str, pairs: str, after: str = "}}") -> bytes:
    meta = f'"finish_reason":null,"output_token_logprobs":[{pairs}]'
    return f'{{"text":"a","output_ids":[{ids}],"meta_info":{{{meta}{after}'.encode()


def test_an_id_of_a_logprob_that_becomes_longer_is_another_one() -> None:
    """Logprobs may come without their text, ``[logprob, id]``: then an event before ends in digits."""
    repeats = RepeatedEvents()
    repeats.see(_event("80", "[-0.5,80]"))
    repeats.see(_event("80,7", "[-0.5,805],[-1.0,7]"))
    assert repeats.took_back


def test_logprobs_that_are_repeated_are_no_others() -> None:
    repeats = RepeatedEvents()
    repeats.see(_event("80", "[-0.5,80]"))
    repeats.see(_event("80,7", "[-0.5,80],[-1.0,7]"))
    assert not repeats.took_back


@pytest.mark.parametrize("after", ["}}", ',"completion_tokens":2}}', '},"rid":"x"}'])
@pytest.mark.parametrize("text", ["a]]b", "]]", "]]}}", "]],", r"\"]],\"x\":", r"]]\\"])
@pytest.mark.parametrize("changed", [True, False])
def test_logprobs_after_a_token_with_brackets_are_compared(text: str, after: str, changed: bool) -> None:
    """A token's text may look like the end of the logprobs."""
    pairs = [f'[-0.{n},{n},"{text if n in (1, 3) else n}"]' for n in range(1, 7)]
    repeats = RepeatedEvents()
    for count in range(1, 7):
        told = pairs[:count]
        if changed and count == 6:
            told[3] = '[-0.7,4,"4"]'
        event = _event(",".join(map(str, range(1, count + 1))), ",".join(told), after)
        if not repeats.see_next(event, 0, len(event)):
            repeats.see(event)
    assert repeats.took_back == changed


def test_last_id_that_becomes_longer_is_another_one() -> None:
    """The logprobs are repeated: only the id differs."""
    repeats = RepeatedEvents()
    repeats.see(_event("8", "[-0.5,8]"))
    repeats.see(_event("8,7", "[-0.5,8],[-1.0,7]"))
    event = _event("8,75,6", "[-0.5,8],[-1.0,7],[-2.0,6]")
    assert not repeats.see_next(event, 0, len(event))
    repeats.see(event)
    assert repeats.took_back
