"""RouterArgs is the gateway's command line, and becomes ours."""

from __future__ import annotations

import argparse
import copy
import pickle
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import pytest
from packaging.version import parse

import sglang_router
from compatibility.gateway import GATEWAY, TheirFlag
from router_core.cli import command_line
from sglang_router import launch_server
from sglang_router.launch_router import RouterArgs, launch_router
from sglang_router.launch_router import main as launch_router_main

#: Not given, where theirs begins: slime-router begins elsewhere, or it has no effect here.
NOT_GIVEN = {
    "--worker-startup-check-interval",
    "--health-check-interval-secs",
    "--health-check-timeout-secs",
    "--log-level",
    "--prometheus-port",
    "--prometheus-host",
}
#: Without the prefix in the gateway, too.
BARE = {"--host", "--port", "--worker-urls"}
#: Values for flags whose values have a form.
WORDS = {
    "--worker-urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
    "--prefill": ["http://127.0.0.1:1", "9000"],
    "--decode": ["http://127.0.0.1:2"],
    "--selector": ["a=b", "c=d"],
    "--prefill-selector": ["a=b"],
    "--decode-selector": ["a=b", "c="],
    "--control-plane-api-keys": ["id:a name:admin:key:with:colons", "two:name:user:key"],
    "--jwt-role-mapping": ["Theirs=admin", "Other=user"],
    "--prometheus-duration-buckets": ["0.1", "0.5"],
    "--cors-allowed-origins": ["https://a.example", "https://b.example"],
}


def parser_of_a_trainer() -> argparse.ArgumentParser:
    """With their flags as slime and miles add them."""
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    return parser


def prefixed(flag: str) -> str:
    return flag if flag in BARE else flag.replace("--", "--router-", 1)


def values(theirs: TheirFlag) -> list[str]:
    """Something that the flag takes, and does not begin with."""
    if theirs.nargs == 0:
        return []
    if theirs.flag in WORDS:
        return WORDS[theirs.flag]
    if theirs.choices:
        return [next(choice for choice in theirs.choices if choice != theirs.default)]
    if isinstance(theirs.default, int | float):
        return [str(theirs.default + 1)]
    return ["7"] * (1 if theirs.nargs == 1 else 2)


def ours(words: list[str]) -> dict[str, Any]:
    """Return the options that slime-router reads in ``words``."""
    parser, _ = command_line(words)
    options, unknown = parser.parse_known_args(words)
    assert unknown == []
    return dict(vars(options))


# flags


def test_the_flags_are_those_of_the_gateway() -> None:
    plain = argparse.ArgumentParser()
    RouterArgs.add_cli_args(plain)
    flags = {action.option_strings[0]: action for action in plain._actions}
    del flags["-h"]
    assert set(flags) == set(GATEWAY)
    for name, theirs in GATEWAY.items():
        nargs = flags[name].nargs
        assert (1 if nargs is None else nargs) == theirs.nargs, name
        if name in NOT_GIVEN:
            assert flags[name].default is None, name
        else:
            assert (flags[name].default or None) == (theirs.default or None), name


def test_a_trainer_has_them_with_a_prefix_and_without_host_and_port() -> None:
    flags = {flag for action in parser_of_a_trainer()._actions for flag in action.option_strings}
    assert flags - {"-h", "--help"} == {prefixed(flag) for flag in GATEWAY} - {"--host", "--port"}


@pytest.mark.parametrize("theirs", GATEWAY.values(), ids=GATEWAY)
@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefixed"])
def test_a_flag_says_what_it_says_on_our_own_command_line(theirs: TheirFlag, prefix: bool) -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=prefix)
    given = [prefixed(theirs.flag) if prefix else theirs.flag, *values(theirs)]
    words = RouterArgs.from_cli_args(parser.parse_args(given), use_router_prefix=prefix).command_line()
    untouched = RouterArgs().command_line()
    assert words != untouched
    assert ours(words) == ours([*untouched, theirs.flag, *values(theirs)])


def test_nothing_that_was_not_given_is_said() -> None:
    args = RouterArgs.from_cli_args(parser_of_a_trainer().parse_args([]), use_router_prefix=True)
    assert args == RouterArgs()
    assert args.command_line() == ["--host=0.0.0.0", "--port=30000", "--policy=cache_aware"]


# a default that somebody set is said: the gateway's cache_aware has thresholds, slime-router's has none


#: The gateway's thresholds.
THRESHOLDS: dict[str, Any] = {
    "cache_threshold": 0.3,
    "balance_abs_threshold": 64,
    "balance_rel_threshold": 1.5,
}


def thresholds(args: RouterArgs) -> dict[str, Any]:
    read = ours(args.command_line())
    return {name: read[name] for name in THRESHOLDS}


@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefixed"])
def test_a_default_that_is_typed_is_said(prefix: bool) -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=prefix)
    typed = {name: theirs.default for name, theirs in GATEWAY.items() if theirs.nargs == 1 and theirs.default}
    assert {f"--{name.replace('_', '-')}" for name in THRESHOLDS} <= typed.keys()
    given = [f"{prefixed(name) if prefix else name}={value}" for name, value in typed.items()]
    words = RouterArgs.from_cli_args(parser.parse_args(given), use_router_prefix=prefix).command_line()
    assert {f"{name}={value}" for name, value in typed.items()} <= set(words)


def test_a_threshold_that_is_typed_wins_over_the_trainers() -> None:
    parser = parser_of_a_trainer()
    parser.set_defaults(router_balance_abs_threshold=10, router_balance_rel_threshold=1.2)  # as slime does
    parsed = parser.parse_args(["--router-balance-abs-threshold", "64"])
    args = RouterArgs.from_cli_args(pickle.loads(pickle.dumps(parsed)), use_router_prefix=True)
    assert thresholds(args) == {
        "cache_threshold": None,
        "balance_abs_threshold": 64,
        "balance_rel_threshold": 1.2,
    }


def test_a_default_in_the_constructor_or_an_assignment_is_said() -> None:
    assert thresholds(RouterArgs(**THRESHOLDS)) == THRESHOLDS
    assigned = RouterArgs(port=7)
    assert set(thresholds(assigned).values()) == {None}
    for name, value in THRESHOLDS.items():
        setattr(assigned, name, value)
    assert thresholds(assigned) == THRESHOLDS
    for same in (pickle.loads(pickle.dumps(assigned)), copy.deepcopy(assigned)):
        assert thresholds(same) == THRESHOLDS
    assert RouterArgs(dp_aware=False, worker_urls=[]).command_line() == RouterArgs().command_line()


def test_defaults_look_as_in_the_gateway() -> None:
    args = RouterArgs(cache_threshold=0.3)
    names = [each.name for each in fields(args)]
    assert list(vars(args)) == list(signature(RouterArgs).parameters) == names
    defaults = {each.name: each.default for each in fields(RouterArgs)}
    parsed = vars(parser_of_a_trainer().parse_args([]))
    for name, value in THRESHOLDS.items():
        told = (defaults[name], getattr(RouterArgs, name), getattr(args, name), parsed[f"router_{name}"])
        assert told == (value,) * 4
        assert {type(each) for each in told} == {type(value)}


@dataclass
class Extended(RouterArgs):
    """Arguments of a trainer, with one of its own and another default."""

    replicas: int = 1
    retry_max_retries: int = 2


def test_only_the_gateways_fields_of_a_subclass_are_said() -> None:
    plain = RouterArgs(port=7).command_line()
    assert Extended(port=7, replicas=2).command_line() == [*plain, "--retry-max-retries=2"]
    assert thresholds(Extended(cache_threshold=0.3))["cache_threshold"] == 0.3
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    args = Extended.from_cli_args(parser.parse_args(["--balance-abs-threshold=64"]))
    assert thresholds(args) == {
        "cache_threshold": None,
        "balance_abs_threshold": 64,
        "balance_rel_threshold": None,
    }


# as trainers use it


def test_arguments_that_slime_sets_are_passed_on() -> None:
    parser = parser_of_a_trainer()
    parser.set_defaults(
        router_log_level="warn", router_balance_abs_threshold=10, router_balance_rel_threshold=1.2
    )
    args = RouterArgs.from_cli_args(parser.parse_args(["--router-policy", "manual"]), use_router_prefix=True)
    args.host, args.port, args.prometheus_port = "10.0.0.7", 3333, 4444
    args.request_timeout_secs = 14400
    args.pd_disaggregation = args.disable_circuit_breaker = True
    assert hasattr(args, "disable_health_check")
    args.disable_health_check = True
    read = ours(args.command_line())
    said = {
        "host": "10.0.0.7",
        "port": 3333,
        "policy": "manual",
        "log_level": "warn",
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "prometheus_port": 4444,
        "request_timeout_secs": 14400.0,
        "pd_disaggregation": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
    }
    assert {name: read[name] for name in said} == said


def test_a_threshold_of_zero_is_said() -> None:
    """verl's and miles' way: no command line, and 0 is no "not given"."""
    args = RouterArgs(host="127.0.0.1", port=7, worker_urls=["http://a:1"], balance_abs_threshold=0)
    read = ours(args.command_line())
    assert (read["balance_abs_threshold"], read["worker_urls"]) == (0, ["http://a:1"])


def test_values_of_the_gateways_own_form_are_said() -> None:
    args = RouterArgs(
        pd_disaggregation=True,
        prefill_urls=[("http://p:1", None), ("http://p:2", 9000)],
        decode_urls=["http://d:1", "http://d:2"],
        selector={"app": "engine", "tier": "1"},
        control_plane_api_keys=[("ops", "Service Account", "a:key", "admin")],
        jwt_role_mapping={"Theirs": "user"},
        server_cert_path="cert",
        server_key_path="key",
    )
    words = args.command_line()
    read = ours(words)
    assert read["prefill"] == [["http://p:1", "none"], ["http://p:2", "9000"]]
    assert read["decode"] == ["http://d:1", "http://d:2"]
    assert read["selector"] == {"app": "engine", "tier": "1"}
    assert "ops:Service Account:admin:a:key" in words
    assert [theirs for theirs, _ in read["jwt_role_mapping"]] == ["Theirs"]
    assert (read["tls_cert_path"], read["tls_key_path"]) == ("cert", "key")


@pytest.mark.parametrize(
    ("host", "read"),
    [(None, "0.0.0.0"), ("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("::", "::")],
)
def test_hosts_are_the_gateways(host: str | None, read: str) -> None:
    assert ours(RouterArgs(host=host).command_line())["host"] == read


def test_router_args_can_be_pickled_and_copied() -> None:
    args = RouterArgs(worker_urls=["http://a:1"], port=7)
    assert pickle.loads(pickle.dumps(args)) == copy.copy(args) == args


def test_no_key_is_in_what_trainers_log() -> None:
    secrets = {"api_key": "hunter2", "oracle_password": "hunter2", "redis_url": "hunter2"}
    keys = [("ops", "name", "hunter2", "admin")]
    args = RouterArgs(**secrets, postgres_db_url="hunter2", control_plane_api_keys=keys, port=3333)  # type: ignore[arg-type]  # by name
    assert "hunter2" not in repr(args)
    assert "port=3333" in repr(args)


def test_the_version_is_one_that_trainers_take() -> None:
    assert parse(sglang_router.__version__) >= parse("0.3.0")  # miles: registers by POST /workers
    assert "slime" in sglang_router.__version__  # slime's image


def test_verl_finds_both_where_it_looks() -> None:
    assert launch_server.launch_router is launch_router
    assert launch_server.RouterArgs is RouterArgs


# what cannot start


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (RouterArgs(backend="openai", host="192.0.2.1"), "--backend is not supported"),
        (argparse.Namespace(policy="nonsense", host="192.0.2.1"), "--policy: no such value 'nonsense'"),
    ],
    ids=["refused", "unknown"],
)
def test_failed_start_is_one_line(
    args: RouterArgs | argparse.Namespace, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch_router(args)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_the_command_takes_our_own_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch_router_main(["--plugin", "radix_cash"])
    assert "no plugin 'radix_cash'" in capsys.readouterr().err
