from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from slime_openai.parsing.stops import StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(places)]


def first_stop(text: str, stops: list[str]) -> int | None:
    """Return the position at which an engine cuts that checks after each character."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None


@given(st.text("ab\n", max_size=20), STOPS, st.lists(st.integers(0, 20), max_size=6))
@example("xab", ["abc", "b"], [1, 2])
@example("aab", ["ab"], [1, 2])
def test_the_text_ends_at_the_first_stop_string_however_it_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown = StopStrings(stops)
    said = "".join(map(shown.feed, pieces(text, cuts))) + shown.finish()
    assert said == text[: first_stop(text, stops)]


@given(st.text("ab\n", max_size=20), STOPS)
def test_only_a_possible_stop_string_is_withheld(text: str, stops: list[str]) -> None:
    shown = StopStrings(stops)
    said = ""
    for position, character in enumerate(text, 1):
        said += shown.feed(character)
        read = text[:position]
        if first_stop(read, stops) is not None:
            break
        waiting = [n for n in range(1, 4) for stop in stops if len(stop) > n and read.endswith(stop[:n])]
        assert said == read[: len(read) - max(waiting, default=0)]


def test_matched_stop_string_is_not_shown() -> None:
    shown = StopStrings(["###"])
    assert shown.feed("Hello ##") == "Hello "
    assert shown.finish("###") == ""


def test_withheld_text_is_shown_when_the_text_ends_otherwise() -> None:
    shown = StopStrings(["###", "\nUser:"])
    assert shown.feed("Hello ##") == "Hello "
    assert shown.finish() == "##"


def test_only_the_stop_string_that_matched_is_left_out() -> None:
    shown = StopStrings(["###", "#\n"])
    assert shown.feed("Hello #") == "Hello "
    assert shown.finish("\n\n") == "#"


def test_an_empty_stop_string_stops_nothing() -> None:
    assert StopStrings([""]).feed("Hello") == "Hello"
