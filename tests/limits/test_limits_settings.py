"""The flags: what cannot be is refused, and -1 is no limit."""

from __future__ import annotations

import logging

import pytest

from router_core import SettingsError
from router_core.cli import build, command_line
from routers import BARE
from slime_limits import Limits, Slots, make_plugin


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--max-concurrent-requests", "0"), "--max-concurrent-requests: wanted 1 or more, or -1"),
        (("--max-concurrent-requests", "-2"), "--max-concurrent-requests: wanted 1 or more, or -1"),
        (("--queue-size", "-1"), "--queue-size: wanted 0 or more"),
        (("--queue-timeout-secs", "0"), "--queue-timeout-secs: wanted a number above 0"),
        (("--queue-timeout-secs", "inf"), "--queue-timeout-secs: wanted a number above 0"),
        (("--rate-limit-tokens-per-second", "-1"), "--rate-limit-tokens-per-second: wanted 0 or more"),
    ],
)
def test_limits_that_cannot_be_are_refused_at_start(flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        build([*BARE, "--plugin", "limits", *flags])


def test_a_rate_without_a_limit_has_no_effect_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        router, _ = build(["--rate-limit-tokens-per-second", "512"])
    assert caplog.messages == [
        "--rate-limit-tokens-per-second has no effect: it is for --max-concurrent-requests"
    ]
    assert "limits" not in dict(router.hooks.pre_request)


@pytest.mark.parametrize("rate", [(), ("--rate-limit-tokens-per-second", "0")])
def test_without_a_rate_slots_are_what_they_were(rate: tuple[str, ...]) -> None:
    plugin = make_plugin(command_line([])[0].parse_args(["--max-concurrent-requests", "2", *rate]))
    assert isinstance(plugin, Limits)
    assert type(plugin.slots) is Slots
