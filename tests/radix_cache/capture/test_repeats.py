"""Events of a cumulative stream that do not repeat the ones before them are seen."""

from __future__ import annotations

from slime_radix_cache.capture.repeats import RepeatedEvents


def _event(ids: str, pairs: str) -> bytes:
    return f'{{"text":"a","output_ids":[{ids}],"meta_info":{{"output_token_logprobs":[{pairs}]}}}}'.encode()


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
