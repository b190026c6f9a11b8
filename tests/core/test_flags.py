"""Fields of a settings dataclass that are flags."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import pytest

from router_core import SettingsError
from router_core.flags import add_flags, flag, read_flags


@dataclass(frozen=True)
class Settings:
    seconds: float = flag("--wait-secs", "--wait", default=1.5, above=0, help="how long")
    endless: float = flag("--idle-secs", default=2.0, above=0, finite=False, help="how long (default 2)")
    share: float = flag("--share", default=0.5, at_least=0, at_most=1, help="how much")
    count: int = flag("--count", default=3, at_least=1, help="how many")
    words: tuple[str, ...] = flag("--words", default=(), nargs="*", action="extend", help="which")
    name: str | None = flag("--name", help="whose")
    quiet: bool = flag("--quiet", default=False, help="say nothing")
    own: str = "no flag"


def parsed(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    return read_flags(Settings, parser.parse_args(arguments))


def test_without_flags_each_field_has_its_default() -> None:
    assert parsed() == Settings()
    assert parsed("--words", "a") != parsed("--words", "b"), "no list is shared"


def test_each_field_has_the_type_of_its_default() -> None:
    given = ["--wait", "2", "--count", "4", "--words", "a", "b", "--words", "c", "--name", "x", "--quiet"]
    assert parsed(*given) == Settings(2.0, count=4, words=("a", "b", "c"), name="x", quiet=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("--wait", "0"), "--wait-secs: wanted a number above 0, got 0.0"),
        (("--wait", "nan"), "--wait-secs: wanted a number above 0, got nan"),
        (("--wait", "inf"), "--wait-secs: wanted a number above 0, got inf"),
        (("--share", "1.1"), "--share: wanted 0 to 1, got 1.1"),
        (("--count", "0"), "--count: wanted 1 or more, got 0"),
    ],
)
def test_a_number_beyond_its_limits_is_told(given: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(SettingsError) as told:
        parsed(*given)
    assert str(told.value) == wanted


def test_a_number_may_be_endless_where_that_is_said() -> None:
    assert parsed("--idle-secs", "inf").endless == math.inf


def test_the_help_tells_each_default_once() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=200))
    add_flags(parser, Settings)
    told = parser.format_help()
    assert "how long (default: 1.5)" in told
    assert "how long (default 2)\n" in told
    assert "whose\n" in told
    assert "say nothing\n" in told
