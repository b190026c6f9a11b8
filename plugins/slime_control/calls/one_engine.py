"""Paths that the router refuses because a request would reach only one engine of many, and what to call instead.

The paths of SGLang are those of ``http_server.py`` (0.5.15) that control an engine or ask for its own state. The paths
of vLLM are its control endpoints, which SGLang's engines lack. Paths that the router answers itself are in
``endpoints`` and ``overview``.
"""

from __future__ import annotations

from router_core.errors import HTTPError, PluginNotLoaded

__all__ = ["NoOwnMetrics", "NotControlled", "OneEngineOnly", "not_controlled", "not_loaded", "refusal"]


class OneEngineOnly(HTTPError):
    """A call that would reach an arbitrary engine, although its caller means all engines, or a certain engine."""

    status, type, code = 501, "not_supported_error", "ONE_ENGINE_ONLY"


class NoOwnMetrics(HTTPError):
    """A request for ``/metrics`` that no plugin answers: the metrics of one engine are not the fleet's."""

    status, type, code = 404, "not_found_error", "NO_METRICS"


class NotControlled(HTTPError):
    """A control call while the workers are of the type passthrough."""

    status, type, code = 501, "not_supported_error", "PASSTHROUGH_WORKERS"


_EACH = "send it to each engine itself; GET /workers lists them"
_SESSION = (
    "open, use and close a session at one engine itself; or let the router keep a conversation on one worker, by the"
    " header X-Session-Id"
)
_VLLM = "it is vLLM's, and the router controls SGLang's engines only"
#: vLLM's paths of calls that SGLang has under another path, each with SGLang's path.
_OWN_OF_VLLM = {
    "/abort_requests": "/abort_request",
    "/finish_weight_update": "/end_weight_update",
    "/init_weight_transfer_engine": "/init_weights_update_group",
    "/pause": "/pause_generation",
    "/reset_prefix_cache": "/flush_cache",
    "/resume": "/continue_generation",
    "/sleep": "/release_memory_occupation",
    "/start_weight_update": "/begin_weight_update",
    "/update_weights": "/update_weights_from_distributed",
    "/v1/load_lora_adapter": "/load_lora_adapter",
    "/v1/unload_lora_adapter": "/unload_lora_adapter",
    "/wake_up": "/resume_memory_occupation",
}
_UPDATE = "/update_weights_from_disk, _tensor, _distributed and _ipc go to all engines"

_INSTEAD = {
    "/get_load": "GET /get_loads asks all engines",
    "/open_session": _SESSION,
    "/close_session": _SESSION,
    **dict.fromkeys(
        (
            "/add_external_corpus", "/clear_hicache_storage_backend", "/configure_logging",
            "/dump_expert_distribution_record", "/freeze_gc", "/get_internal_state",
            "/get_remote_instance_transfer_engine_info", "/get_weights_by_name", "/hibernate",
            "/list_external_corpora", "/remote_instance_transfer_engine_info", "/remove_external_corpus",
            "/set_internal_state", "/set_trace_level", "/slow_down", "/start_expert_distribution_record",
            "/stop_expert_distribution_record", "/weights_checker",
        ),
        _EACH,
    ),
    **dict.fromkeys(
        ("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        f"{_EACH}; {_UPDATE}",
    ),
    **dict.fromkeys(("/collective_rpc", "/is_paused", "/is_sleeping", "/reset_mm_cache", "/scale_elastic_ep"), _VLLM),
    **{path: f"{_VLLM}; SGLang's call is POST {own}" for path, own in _OWN_OF_VLLM.items()},
}  # fmt: skip
#: Paths that the plugin radix_cache answers, if it is loaded.
_RECORDS = ("/retrieve_from_text", "/retrieve_from_messages_template", "/cache_stats")
_TRAJECTORIES = "/trajectories"
#: Prefixes of SGLang's paths: all paths with these prefixes are refused.
_TREES = ("/dumper/", "/hicache/")


def not_controlled(path: str) -> HTTPError:
    """Return the error for a control call to passthrough workers."""
    return NotControlled(
        f"{path} was sent to no worker: all are of the type passthrough, which the router only proxies to."
        " Control each server itself, in its own protocol; GET /workers lists them"
    )


def not_loaded(path: str) -> HTTPError | None:
    """Return the error for a ``path`` of a plugin that is not loaded; None for other paths."""
    if path not in _RECORDS and path != _TRAJECTORIES and not path.startswith(f"{_TRAJECTORIES}/"):
        return None
    return PluginNotLoaded(
        f"{path[:200]} belongs to the plugin radix_cache, which is not loaded: start the router with"
        " --plugin radix_cache --hf-checkpoint PATH"
    )


def refusal(path: str) -> HTTPError | None:
    """Return the error for a ``path`` whose requests go to no engine; None when any engine may get them."""
    if path.startswith("/metrics"):  # SGLang answers all paths with this prefix
        return NoOwnMetrics(
            "the router's own metrics, at GET /metrics, need the plugin metrics, which is loaded by default;"
            " GET /engine_metrics has the metrics of all engines"
        )
    instead = _EACH if path.startswith(_TREES) else _INSTEAD.get(path)
    if instead is None:
        return None
    return OneEngineOnly(f"{path[:200]} would reach one engine only, not always the same one: {instead}")
