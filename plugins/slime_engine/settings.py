"""Settings of an engine, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slime_engine.kv_events import KVEventsConfig
from slime_engine.script import Script

__all__ = ["BackendName", "DisaggregationMode", "Settings"]

DisaggregationMode = Literal["null", "prefill", "decode"]
BackendName = Literal["ngram", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an engine. Raises ValueError if they are invalid.

    ``latency_ms``: time before a request's first token. ``tokens_per_second``: pace of each request's later tokens (0:
    as fast as possible). ``seed`` None: requests without a ``sampling_seed`` differ from run to run.
    ``load_in_background``: listen while the model loads, and refuse generations until it is loaded. ``journal_file``: a
    file to which the journal is appended. ``disaggregation_mode``: if a sequence has a bootstrap room, a ``prefill``
    engine samples its first token, and hands the sequence over to a ``decode`` engine. ``dp_size``: data-parallel
    ranks, each with caches and a running batch of its own. ``script``: answers to the prompts that its entries match.

    For the backend ``transformers`` only: ``model`` is a path or a name. ``model_cache``: directory for converted GGUF
    files (None: ``~/.cache/slime-router``). ``prefix_cache_tokens``: tokens of ended sequences that later sequences of
    the same rank can reuse. ``threads``: CPU threads of the model (0: half of the cores).

    For the backend ``ngram`` only: ``kv_cache_tokens``: tokens that a simulated KV cache of each rank holds (0: no such
    cache), in blocks of ``page_size`` tokens. ``prefill_tokens_per_second``: pace of prompt tokens that the cache lacks
    (0: they take no time). ``kv_events_config``: JSON that says where changes of the cache are published (None:
    nowhere). ``moe_layers``: layers with simulated routed experts (0: no routed experts).
    """

    model_name: str = "slime-ngram"
    latency_ms: float = 0.0
    tokens_per_second: float = 0.0
    context_length: int = 32768
    seed: int | None = None
    weight_version: str = "default"
    moe_layers: int = 0
    moe_experts: int = 64
    moe_topk: int = 4
    incremental_streaming_output: bool = False
    max_running_requests: int = 256
    journal_size: int = 100_000
    journal_file: str | None = None
    load_in_background: bool = False
    disaggregation_mode: DisaggregationMode = "null"
    dp_size: int = 1
    script: Script | None = None
    backend: BackendName = "ngram"
    model: str = ""
    model_cache: str | None = None
    prefix_cache_tokens: int = 32768
    threads: int = 0
    kv_cache_tokens: int = 0
    page_size: int = 1
    prefill_tokens_per_second: float = 0.0
    kv_events_config: str | None = None

    def __post_init__(self) -> None:
        times = ("latency_ms", "tokens_per_second", "prefill_tokens_per_second")
        for name in (*times, "moe_layers", "prefix_cache_tokens", "kv_cache_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        counts = (
            "context_length",
            "moe_experts",
            "moe_topk",
            "max_running_requests",
            "journal_size",
            "dp_size",
            "page_size",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.disaggregation_mode not in get_args(DisaggregationMode):
            modes = ", ".join(get_args(DisaggregationMode))
            raise ValueError(f"disaggregation_mode must be one of {modes}, got {self.disaggregation_mode!r}")
        if self.backend not in get_args(BackendName):
            raise ValueError(
                f"backend must be one of {', '.join(get_args(BackendName))}, got {self.backend!r}"
            )
        if (self.backend == "transformers") != bool(self.model):
            raise ValueError(
                f"model and backend transformers go together: give both, or none; got backend {self.backend}"
                f" and model {self.model!r}"
            )
        if self.backend == "transformers" and self.moe_layers:
            raise ValueError("moe_layers simulates experts for the backend ngram; a real model has its own")
        for name in ("kv_cache_tokens", "prefill_tokens_per_second"):
            if self.backend == "transformers" and getattr(self, name):
                raise ValueError(
                    f"{name} is for the simulated KV cache of the backend ngram; a real model has its own cache"
                )
        if self.kv_events is not None and not self.kv_cache_tokens:
            raise ValueError("kv_events_config publishes the simulated KV cache; give kv_cache_tokens, too")
        if self.moe_topk > self.moe_experts:
            raise ValueError(f"moe_topk {self.moe_topk} is more than moe_experts {self.moe_experts}")
        if self.journal_file is not None and not Path(self.journal_file).parent.is_dir():
            raise ValueError(
                f"journal_file: wanted a path in an existing directory, got {self.journal_file!r}"
            )

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """The settings of ``kv_events_config``; None without a publisher. Raises ValueError."""
        if self.kv_events_config is None:
            return None
        try:
            config = KVEventsConfig.of(self.kv_events_config)
            config.shifted(self.dp_size - 1)  # raises ValueError if the last rank's ports are beyond 65535
        except ValueError as error:
            raise ValueError(f"kv_events_config: {error}") from None
        return None if config.publisher == "null" else config
