"""The flags: what cannot be is refused, and -1 is no limit."""

from __future__ import annotations

import pytest

from router_core import SettingsError
from router_core.cli import build


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--max-concurrent-requests", "0"), "--max-concurrent-requests: wanted 1 or more, or -1"),
        (("--max-concurrent-requests", "-2"), "--max-concurrent-requests: wanted 1 or more, or -1"),
        (("--queue-size", "-1"), "--queue-size: wanted 0 or more"),
        (("--queue-timeout-secs", "0"), "--queue-timeout-secs: wanted a number above 0"),
        (("--queue-timeout-secs", "inf"), "--queue-timeout-secs: wanted a number above 0"),
    ],
)
def test_limits_that_cannot_be_are_refused_at_start(flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        build(["--no-default-plugins", "--plugin", "limits", *flags])
