"""The arguments of the SGLang gateway, and their conversion to a command line of slime-router."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_args

__all__ = ["RouterArgs"]

#: Options of argparse for flags with several values. With ``append``, each use of a flag adds one group of values.
_ANY = {"nargs": "*"}
_SOME = {"nargs": "+"}
_GROUPS = {"nargs": "+", "action": "append"}
_ONES = {"nargs": 1, "action": "append"}


class _GivenFields:
    """Notes which fields of a dataclass were given to its constructor, or assigned later.

    The note is a slot, so ``vars()`` has fields only; copies and pickles keep it.
    """

    __slots__ = ("_given",)
    _given: frozenset[str]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        self = super().__new__(cls)
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # a dataclass
        self._given = frozenset((*names[: len(values)], *named))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):  # the first value comes from the constructor, and may be the default
            self._given |= {name}
        super().__setattr__(name, value)


class _Typed(argparse.Action):
    """Stores a value, and lists its flag in the result, since a typed value may equal the default."""

    def __call__(
        self, _: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _TYPED, [*getattr(namespace, _TYPED, ()), self.dest])


@dataclass
class RouterArgs(_GivenFields):
    """Arguments of sglang-router 0.3.2, a field for each flag. Values are Python objects or words of a command line.

    A default is the gateway's, or None (not given). The command line always has the host and the port, and the policy
    unless it is None. Any other field that was not set is left out, so slime-router's own default applies. A field was
    set if it differs from its default, or if it was typed as a flag, given to the constructor or assigned. A value that
    equals the default counts as not set if it comes from ``set_defaults``, or from a namespace that no parser made.
    ``dataclasses.replace`` sets all fields.
    Trainers log these objects, so their ``repr`` shows no key.
    """

    worker_urls: list[str] = field(default_factory=list, metadata=_ANY)
    host: str | None = "0.0.0.0"
    port: int = 30000
    # prefill and decode
    mini_lb: bool = False
    pd_disaggregation: bool = False
    prefill_urls: list[Any] = field(default_factory=list, metadata=_GROUPS)  # (url, bootstrap port or None)
    decode_urls: list[Any] = field(default_factory=list, metadata=_ONES)
    # policies
    policy: str | None = "cache_aware"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    worker_startup_timeout_secs: int = 1800
    worker_startup_check_interval: int | None = None
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    bucket_adjust_interval_secs: int = 5
    eviction_interval_secs: int = 60
    max_tree_size: int = 2**26
    max_idle_secs: int = 4 * 3600
    assignment_mode: str = "random"
    max_payload_size: int = 512 * 1024 * 1024
    dp_aware: bool = False
    enable_igw: bool = False
    # log
    log_dir: str | None = None
    log_level: str | None = None
    # pods
    service_discovery: bool = False
    selector: Any = field(default_factory=list, metadata=_SOME)
    service_discovery_port: int = 80
    service_discovery_namespace: str | None = None
    prefill_selector: Any = field(default_factory=list, metadata=_SOME)
    decode_selector: Any = field(default_factory=list, metadata=_SOME)
    bootstrap_port_annotation: str = "sglang.ai/bootstrap-port"  # the gateway has no flag for this
    # metrics
    prometheus_port: int | None = None
    prometheus_host: str | None = None
    prometheus_duration_buckets: list[Any] = field(default_factory=list, metadata=_SOME)
    # requests
    request_id_headers: list[str] = field(default_factory=list, metadata=_ANY)
    request_timeout_secs: int = 1800
    shutdown_grace_period_secs: int = 180
    cors_allowed_origins: list[str] = field(default_factory=list, metadata=_ANY)
    max_concurrent_requests: int = -1
    queue_size: int = 100
    queue_timeout_secs: int = 60
    rate_limit_tokens_per_second: int | None = None
    # retries
    retry_max_retries: int = 5
    retry_initial_backoff_ms: int = 50
    retry_max_backoff_ms: int = 30_000
    retry_backoff_multiplier: float = 1.5
    retry_jitter_factor: float = 0.2
    disable_retries: bool = False
    cb_failure_threshold: int = 10
    cb_success_threshold: int = 3
    cb_timeout_duration_secs: int = 60
    cb_window_duration_secs: int = 120
    disable_circuit_breaker: bool = False
    # health
    health_failure_threshold: int = 3
    health_success_threshold: int = 2
    health_check_timeout_secs: int | None = None
    health_check_interval_secs: int | None = None
    health_check_endpoint: str = "/health"
    disable_health_check: bool = False
    # models
    model_path: str | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    tokenizer_cache_enable_l0: bool = False
    tokenizer_cache_l0_max_entries: int = 10_000
    tokenizer_cache_enable_l1: bool = False
    tokenizer_cache_l1_max_memory: int = 50 * 1024 * 1024
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    mcp_config_path: str | None = None
    backend: str = "sglang"
    history_backend: str = "memory"
    oracle_wallet_path: str | None = None
    oracle_tns_alias: str | None = None
    oracle_connect_descriptor: str | None = None
    oracle_username: str | None = None
    oracle_password: str | None = field(default=None, repr=False)
    oracle_pool_min: int = 1
    oracle_pool_max: int = 16
    oracle_pool_timeout_secs: int = 30
    postgres_db_url: str | None = field(default=None, repr=False)
    postgres_pool_max: int = 16
    redis_url: str | None = field(default=None, repr=False)
    redis_pool_max: int = 16
    redis_retention_days: int = 30
    # TLS
    client_cert_path: str | None = None
    client_key_path: str | None = None
    ca_cert_paths: list[str] = field(default_factory=list, metadata=_ANY)
    server_cert_path: str | None = None
    server_key_path: str | None = None
    # traces
    enable_trace: bool = False
    otlp_traces_endpoint: str = "localhost:4317"
    # authentication
    api_key: str | None = field(default=None, repr=False)
    control_plane_api_keys: list[Any] = field(
        default_factory=list, repr=False, metadata=_ANY
    )  # (id, name, key, role)
    control_plane_audit_enabled: bool = False
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_jwks_uri: str | None = None
    jwt_role_mapping: Any = field(default_factory=list, metadata=_ANY)

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, use_router_prefix: bool = False, exclude_host_port: bool = False
    ) -> None:
        """Add the gateway's flags to ``parser``. ``use_router_prefix``: most of them as ``--router-...``."""
        told = "the gateway's flags for slime-router, whose docs/plugins/sglang.md says what differs"
        group = parser.add_argument_group("SGLang router", told)
        plain = RouterArgs()
        for each in fields(RouterArgs):
            if each.name in _WITHOUT_FLAG or (exclude_host_port and each.name in ("host", "port")):
                continue
            flag = f"--{_prefix(each.name, use_router_prefix)}{_spelt(each.name)}"
            default = getattr(plain, each.name)
            if each.type is bool:
                group.add_argument(flag, action="store_true")
            elif each.metadata:
                group.add_argument(flag, default=default, **each.metadata)
            else:
                kind = (get_args(each.type) or (each.type,))[0]  # int, also for "int | None"
                group.add_argument(flag, default=default, type=kind, action=_Typed)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, use_router_prefix: bool = False) -> Self:
        """Make arguments from ``args``, the result of a parser with these flags. Other options are ignored."""
        given = vars(args)
        typed: Sequence[str] = given.get(_TYPED, ())
        found = {}
        for each in fields(cls):
            flag = f"{_prefix(each.name, use_router_prefix)}{_spelt(each.name)}"
            dest = flag.replace("-", "_")
            if dest in given and (dest in typed or given[dest] != each.default):
                found[each.name] = given[dest]
        return cls(**found)

    def command_line(self) -> list[str]:
        """Return the flags for slime-router: host, port, policy unless None, and all others that were set.

        The environment may set the flags that are left out.
        """
        words = [f"--host={(self.host or '0.0.0.0').strip('[]')}", f"--port={self.port}"]
        if self.policy is not None:
            # Also the gateway's default: trainers set thresholds for cache_aware, and slime-router's default is auto.
            words.append(f"--policy={self.policy}")
        for each in fields(RouterArgs):  # fields of a subclass are no flags of slime-router
            value = getattr(self, each.name)
            if each.name in ("host", "port", "policy", *_WITHOUT_FLAG) or value is None:
                continue
            if each.name in self._given or value != each.default:
                words += _words(each.name, value)
        return words


#: Attribute of a parser's result: the names, in this result, of the flags that were typed.
_TYPED = "typed_router_flags"
_WITHOUT_FLAG = ("bootstrap_port_annotation",)
_OTHERWISE_SPELT = {
    "prefill_urls": "prefill",
    "decode_urls": "decode",
    "server_cert_path": "tls-cert-path",
    "server_key_path": "tls-key-path",
}


def _prefix(name: str, wanted: bool) -> str:
    """Return ``router-`` if ``wanted``, except for the three flags that have no prefix in the gateway either."""
    return "router-" if wanted and name not in ("host", "port", "worker_urls") else ""


def _spelt(name: str) -> str:
    return _OTHERWISE_SPELT.get(name, name.replace("_", "-"))


def _words(name: str, value: Any) -> list[str]:
    """Return ``value`` of a field as words of a command line."""
    flag = f"--{_spelt(name)}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, dict):
        value = [f"{key}={one}" for key, one in value.items()]
    if not isinstance(value, list | tuple):
        return [f"{flag}={value}"]
    if name in ("prefill_urls", "decode_urls"):
        groups = [(one,) if isinstance(one, str) else one for one in value]
        words = [(flag, *("none" if it is None else str(it) for it in group)) for group in groups]
        return [word for each in words for word in each]
    if name == "control_plane_api_keys":
        value = [one if isinstance(one, str) else ":".join((one[0], one[1], one[3], one[2])) for one in value]
    return [flag, *map(str, value)] if value else []
