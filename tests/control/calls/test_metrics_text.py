"""The metrics of several engines in one text, as a Prometheus server reads it."""

from __future__ import annotations

import pytest

from slime_control.calls.metrics_text import families_in, merged

ONE = b"""\
# a comment of its own
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
# HELP sglang:ttft_seconds Time.
# TYPE sglang:ttft_seconds histogram
sglang:ttft_seconds_bucket{le="0.1"} 1
sglang:ttft_seconds_bucket{le="+Inf"} 2
sglang:ttft_seconds_sum 0.25
sglang:ttft_seconds_count 2
# HELP tokens_total Tokens.
# TYPE tokens_total counter
tokens_total 12 1395066363000
untyped{} NaN
# EOF
"""


def both(one: bytes, other: bytes = ONE) -> str:
    return merged([families_in(one, "http://a:1"), families_in(other, "http://b:2")]).decode()


def test_each_metric_is_told_once_and_its_samples_stand_together() -> None:
    lines = both(ONE).splitlines()
    assert lines == [
        "# HELP sglang_num_running_reqs The number of running requests.",
        "# TYPE sglang_num_running_reqs gauge",
        'sglang_num_running_reqs{worker_addr="http://a:1",model_name="m",tp_rank="0"} 3.0',
        'sglang_num_running_reqs{worker_addr="http://b:2",model_name="m",tp_rank="0"} 3.0',
        "# HELP sglang_ttft_seconds Time.",
        "# TYPE sglang_ttft_seconds histogram",
        *(
            f'sglang_ttft_seconds{name}{{worker_addr="http://{host}"{label}}} {value}'
            for host in ("a:1", "b:2")
            for name, label, value in (
                ("_bucket", ',le="0.1"', "1"),
                ("_bucket", ',le="+Inf"', "2"),
                ("_sum", "", "0.25"),
                ("_count", "", "2"),
            )
        ),
        "# HELP tokens_total Tokens.",
        "# TYPE tokens_total counter",
        'tokens_total{worker_addr="http://a:1"} 12 1395066363000',
        'tokens_total{worker_addr="http://b:2"} 12 1395066363000',
        'untyped{worker_addr="http://a:1"} NaN',
        'untyped{worker_addr="http://b:2"} NaN',
    ]


def test_a_metric_that_only_one_has_stands_there_too() -> None:
    text = both(b"# TYPE only gauge\nonly 1\n")
    assert '# TYPE only gauge\nonly{worker_addr="http://a:1"} 1\n' in text


def test_what_is_told_of_a_metric_without_samples_is_left_out() -> None:
    assert both(b"# TYPE unused gauge\n", b"") == ""


def test_values_of_labels_stay_as_they_are() -> None:
    odd = rb'm{a="x\"y\\",b="{,}",c="# worker",d="\n"} 1'
    assert both(odd, b"") == r'm{worker_addr="http://a:1",a="x\"y\\",b="{,}",c="# worker",d="\n"} 1' + "\n"


def test_a_worker_is_escaped() -> None:
    (family,) = families_in(b"m 1", 'a"b\\c\nd').values()
    assert family.samples == [rb'm{worker_addr="a\"b\\c\nd"} 1']


def test_a_label_of_the_same_name_is_renamed() -> None:
    """An engine may be a router itself. No other label, and no value, is taken for it."""
    text = both(b'm{a="x,worker_addr=1", worker_addr = "http://c:3",my_worker_addr="d",} 1', b"")
    assert text == (
        'm{worker_addr="http://a:1",a="x,worker_addr=1",exported_worker_addr="http://c:3",my_worker_addr="d"} 1\n'
    )


@pytest.mark.parametrize(
    "text", [b"<html>", b'{"error": 1}', b'm{a="1} 2', b"m", b"m{} one two", b"m{worker_addr} 1", b"1m 1"]
)
def test_what_is_no_metrics_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"line 1 is no Prometheus sample|labels cannot be read"):
        families_in(text, "http://a:1")


def test_notes_are_comments_whatever_is_in_them() -> None:
    text = merged([families_in(b"m 1", "http://a:1")], ["left out: http://b:2: bad\nm 5"])
    assert text.decode().splitlines() == [
        "# left out: http://b:2: bad m 5",
        'm{worker_addr="http://a:1"} 1',
    ]
