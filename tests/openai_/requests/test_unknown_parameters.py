"""Parameters that no API has: what becomes of them, and where they are named."""

from __future__ import annotations

import logging

import pytest

from slime_openai.errors import InvalidRequest, UnknownParameter
from slime_openai.requests.unknown_parameters import TreatedParameters, UnknownMode, UnknownParameters

HEADER = b"x-slime-unknown-parameters"


def named(treated: TreatedParameters) -> str:
    [(name, value)] = treated.headers
    assert name == HEADER
    return value.decode()


@pytest.mark.parametrize("mode", ["warn", "refuse", "pass"])
def test_nothing_unknown_is_nothing_to_treat(mode: UnknownMode) -> None:
    assert UnknownParameters(mode).treat({}) == TreatedParameters({}, [])


def test_a_warning_names_them_and_passes_nothing_on() -> None:
    treated = UnknownParameters("warn").treat({"max_token": 5, "use_beam_search": False})
    assert treated.passed == {}
    assert named(treated) == "max_token, use_beam_search"


def test_a_refusal_names_all() -> None:
    with pytest.raises(UnknownParameter) as raised:
        UnknownParameters("refuse").treat({"max_token": 5, "b": 1})
    assert raised.value.param == "max_token"
    assert "'max_token', 'b'" in str(raised.value)


def test_the_router_writes_its_own_fields_itself() -> None:
    unknown = {"mystery": [1], "text": "other", "sampling_params": {"n": 5}, "return_logprob": False}
    treated = UnknownParameters("pass").treat(unknown)
    assert treated.passed == {"mystery": [1]}
    assert named(treated) == "mystery, text, sampling_params, return_logprob"


def test_a_value_that_cannot_be_written_is_refused() -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(InvalidRequest) as raised:
        UnknownParameters("pass").treat({"a\nb": deep})
    assert raised.value.param == "a?b"
    assert UnknownParameters("warn").treat({"a": deep}).passed == {}


def test_names_are_cut_and_cleaned() -> None:
    treated = UnknownParameters("warn").treat({"a\r\nx-evil: 1": 1, "é": 1, "": 1, "x" * 100: 1})
    assert named(treated) == f"a??x-evil??1, ?, ?, {'x' * 64}"


def test_a_header_has_an_end() -> None:
    treated = UnknownParameters("warn").treat({f"{number}{'x' * 1000}": 1 for number in range(10_000)})
    assert named(treated).endswith(", ...")
    assert named(treated).count(",") == 16
    assert len(named(treated)) < 1100


def test_a_name_is_logged_once_and_not_too_many_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "slime_openai")
    parameters = UnknownParameters("warn")
    for _ in range(3):
        parameters.treat({"max_token": 5})
    [record] = caplog.records
    assert "the unknown parameter max_token of a request had no effect" in record.getMessage()
    for number in range(1000):
        parameters.treat({f"x{number}": 1})
    assert len(caplog.records) == 256
