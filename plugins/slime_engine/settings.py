"""Settings of an engine, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from slime_engine.flags import flag
from slime_engine.kv_events import KVEventsConfig
from slime_engine.script import Script

__all__ = ["BackendName", "DisaggregationMode", "Settings"]

DisaggregationMode = Literal["null", "prefill", "decode"]
BackendName = Literal["ngram", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an engine. All but ``load_in_background`` have a flag. Raises ValueError if they are invalid.

    For the backend ``transformers`` only: ``model``, ``model_cache``, ``prefix_cache_tokens`` and ``threads``. For the
    backend ``ngram`` only: the simulated KV cache of each rank, and the simulated mixture of experts.

    ``model_name``: on a command line with ``model``, the default is the last part of that path.
    ``tokens_per_second``: pace of the tokens after the first one. ``seed`` None: requests without a ``sampling_seed``
    differ from run to run. ``disaggregation_mode``: if a sequence has a bootstrap room, a ``prefill`` engine samples
    the first token of the sequence, and hands the sequence over to a ``decode`` engine. ``load_in_background``: listen
    while the model loads, and refuse generations until the model is loaded.
    """

    backend: BackendName = flag(
        "the model's implementation (default ngram; transformers: the model of --model)",
        "ngram", "{ngram,transformers}",
    )  # fmt: skip
    model: str = flag("checkpoint directory, GGUF file, or smollm2, for the backend transformers", "", "PATH")
    model_cache: str | None = flag(
        "directory for converted GGUF files (default ~/.cache/slime-router)", metavar="DIR"
    )
    prefix_cache_tokens: int = flag(
        "tokens of ended sequences that later sequences can reuse", 32768, at_least=0
    )
    threads: int = flag("CPU threads of a real model (default 0: half of the cores)", 0, at_least=0)
    model_name: str = flag("model name that the engine reports", "slime-ngram")
    latency_ms: float = flag("milliseconds before a request's first token (default 0)", 0.0, at_least=0)
    tokens_per_second: float = flag("pace of each request (default 0: as fast as possible)", 0.0, at_least=0)
    kv_cache_tokens: int = flag(
        "tokens that the simulated KV cache of each rank holds (default 0: no cache)", 0, at_least=0
    )
    page_size: int = flag("tokens of a block of the simulated KV cache", 1, at_least=1)
    prefill_tokens_per_second: float = flag(
        "pace of prompt tokens that the simulated KV cache lacks (default 0: they take no time)",
        0.0, at_least=0,
    )  # fmt: skip
    kv_events_config: str | None = flag(
        "SGLang's JSON that says where changes of the simulated KV cache are published,"
        """ such as '{"publisher": "zmq", "endpoint": "tcp://*:5557"}' (default: nowhere)""",
        metavar="JSON",
    )
    context_length: int = flag("tokens that a prompt and its completion may have in sum", 32768, at_least=1)
    seed: int | None = flag("makes sampling repeatable for requests without a sampling_seed", kind=int)
    weight_version: str = flag(
        "weight version to start with; with ngram, each version has other weights", "default"
    )
    moe_layers: int = flag("layers of the simulated mixture of experts (default 0: none)", 0, at_least=0)
    moe_experts: int = flag("experts per layer", 64, at_least=1)
    moe_topk: int = flag("experts that each token uses in a layer", 4, at_least=1)
    max_running_requests: int = flag("sequences that a rank generates at the same time", 256, at_least=1)
    journal_size: int = flag("sequences that GET /journal remembers", 100_000, at_least=1)
    disaggregation_mode: DisaggregationMode = flag(
        "the part of each generation that the engine does (default null: all of it)",
        "null", "{null,prefill,decode}",
    )  # fmt: skip
    dp_size: int = flag("data-parallel ranks, each with its own caches and batch", 1, at_least=1)
    journal_file: str | None = flag(
        "append the journal to this file too, before a client is answered", metavar="FILE"
    )
    incremental_streaming_output: bool = flag(
        "let each event of a stream have only new text and ids, not all so far", False
    )
    script: Script | None = flag(
        "JSON Lines with answers to given prompts; the model answers all other prompts", metavar="FILE"
    )
    load_in_background: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("at_least")
            if least is not None and value < least:
                wanted = f"be at least {least}" if least else "not be negative"
                raise ValueError(f"{each.name} must {wanted}, got {value}")
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
