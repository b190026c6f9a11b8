"""OpenAI's body for whatever goes wrong."""

from __future__ import annotations

import orjson
import pytest

from router_core.errors import BadRequest, HTTPError, NoWorker, PayloadTooLarge, WorkerTimeout
from slime_openai.errors import (
    InvalidRequest,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
    error_body,
    error_object,
    wrong,
)


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            MissingParameter("prompt", "text"),
            "Missing required parameter: 'prompt'; wanted text.",
            "missing_required",
        ),
        (UnknownParameter("tmp"), "Unknown parameter: 'tmp'.", "unknown_parameter"),
        (UnknownParameter("a", "b"), "Unknown parameters: 'a', 'b'.", "unknown_parameter"),
        (UnsupportedParameter("audio", "no"), "Unsupported parameter: 'audio': no.", "unsupported_parameter"),
        (wrong("n", "a number", "5"), "Invalid value for 'n': wanted a number, got '5'.", "invalid_value"),
    ],
)
def test_a_client_is_told_what_is_wrong_and_where(error: InvalidRequest, message: str, code: str) -> None:
    told = orjson.loads(error_body(error))["error"]
    assert told["message"] == message
    assert told["type"] == "invalid_request_error"
    assert told["param"] == error.param
    assert told["code"].startswith(code)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no"), "invalid_request_error"),
        (PayloadTooLarge("no"), "invalid_request_error"),
        (NoWorker("no"), "server_error"),
        (WorkerTimeout("no"), "server_error"),
    ],
)
def test_the_routers_own_errors_have_the_same_form(error: HTTPError, kind: str) -> None:
    assert orjson.loads(error_body(error)) == {
        "error": {"message": "no", "type": kind, "param": None, "code": error.code}
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
    ],
)
def test_the_status_of_a_worker_decides_the_type(status: int, kind: str) -> None:
    assert error_object(status, "no")["error"] == {"message": "no", "type": kind, "param": None, "code": None}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (False, "false"),
        (1, "1"),
        (0.5, "0.5"),
        ([1, 2], "a list of length 2"),
        ({"a": 1}, "an object"),
        ("x" * 81, f"'{'x' * 80}'..."),
    ],
)
def test_rejected_value_is_shown_as_short_json(value: object, shown: str) -> None:
    assert str(wrong(None, "more", value)) == f"Invalid value for the body: wanted more, got {shown}."


def test_a_long_name_is_not_repeated_at_length() -> None:
    assert len(str(UnknownParameter("x" * 10_000))) < 200
    many = str(UnknownParameter(*(f"{number:>10000}" for number in range(1000))))
    assert many.endswith("and 984 more.")
    assert len(many) < 2000
