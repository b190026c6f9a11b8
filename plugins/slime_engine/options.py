"""The engine's flags: ``--model ...`` of ``slime-router engine``, ``--engine-model ...`` of the plugin."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime_engine.script import read_script
from slime_engine.settings import Settings

__all__ = ["add_engine_options", "as_flag", "settings_from"]

#: Not made by :mod:`router_core.flags`: the plugin adds a prefix, and a flag that is not given has no value.
_FLAGS: dict[str, tuple[type, str]] = {
    "backend": (str, "the model's implementation (default ngram; transformers: the model of --model)"),
    "model": (str, "checkpoint directory, GGUF file, or smollm2, for the backend transformers"),
    "model-cache": (str, "directory for converted GGUF files (default ~/.cache/slime-router)"),
    "prefix-cache-tokens": (int, "tokens of ended sequences that later sequences can reuse (default 32768)"),
    "threads": (int, "CPU threads of a real model (default 0: half of the cores)"),
    "model-name": (str, "model name that the engine reports"),
    "latency-ms": (float, "milliseconds before a request's first token (default 0)"),
    "tokens-per-second": (float, "pace of each request (default 0: as fast as possible)"),
    "kv-cache-tokens": (int, "tokens of a simulated KV cache, one for each rank (default 0: none)"),
    "page-size": (int, "tokens of a block of the simulated KV cache (default 1)"),
    "prefill-tokens-per-second": (
        float,
        "pace of prompt tokens that the simulated KV cache lacks (default 0: they take no time)",
    ),
    "kv-events-config": (
        str,
        "SGLang's JSON that says where changes of the simulated KV cache are published,"
        """ such as '{"publisher": "zmq", "endpoint": "tcp://*:5557"}' (default: nowhere)""",
    ),
    "context-length": (int, "tokens that prompt and completion may have together (default 32768)"),
    "seed": (int, "makes sampling repeatable for requests without a sampling_seed"),
    "weight-version": (str, "weight version to start with; with ngram, each version has other weights"),
    "moe-layers": (int, "layers of the simulated mixture of experts (default 0: none)"),
    "moe-experts": (int, "experts per layer (default 64)"),
    "moe-topk": (int, "experts that each token uses in a layer (default 4)"),
    "max-running-requests": (int, "sequences that a rank generates at the same time (default 256)"),
    "journal-size": (int, "sequences that GET /journal remembers (default 100000)"),
    "disaggregation-mode": (
        str,
        "the part of each generation that the engine does (default null: all of it)",
    ),
    "dp-size": (int, "data-parallel ranks, each with its own caches and batch (default 1)"),
    "journal-file": (str, "append the journal to this file too, before a client is answered"),
}
_METAVARS = {
    "backend": "{ngram,transformers}",
    "disaggregation-mode": "{null,prefill,decode}",
    "journal-file": "FILE",
    "kv-events-config": "JSON",
    "model": "PATH",
    "model-cache": "DIR",
}


def add_engine_options(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add a flag ``--<prefix><field>`` for each field of Settings that a user may set."""
    for name, (kind, explanation) in _FLAGS.items():
        metavar = _METAVARS.get(name, {int: "N", float: "X", str: "NAME"}[kind])
        parser.add_argument(f"--{prefix}{name}", type=kind, default=None, metavar=metavar, help=explanation)
    parser.add_argument(
        f"--{prefix}incremental-streaming-output",
        action="store_true",
        help="let each event of a stream have only new text and ids, not all so far",
    )
    parser.add_argument(
        f"--{prefix}script",
        metavar="FILE",
        help="JSON Lines with answers to given prompts; the model answers all other prompts",
    )


def as_flag(error: ValueError, prefix: str = "") -> str:
    """Return the message of ``error``. If the first word is the name of a setting, the flag replaces that word."""
    name, space, rest = str(error).partition(" ")
    plain = name.removeprefix("--").replace("_", "-")
    return f"--{prefix}{plain}{space}{rest}" if plain.rstrip(":") in {*_FLAGS, "script"} else str(error)


def settings_from(options: argparse.Namespace, prefix: str = "", **more: Any) -> Settings:
    """Return settings from the given flags. Raises ValueError when a flag or the script is invalid."""
    given = vars(options)
    values = {field.name: given.get(prefix.replace("-", "_") + field.name) for field in fields(Settings)}
    if values["script"] is not None:
        try:
            values["script"] = read_script(values["script"])
        except ValueError as error:
            raise ValueError(f"script: {error}") from None
    if values["model"] is not None and values["model_name"] is None:
        values["model_name"] = Path(values["model"]).name
    return Settings(**{name: value for name, value in values.items() if value is not None} | more)
