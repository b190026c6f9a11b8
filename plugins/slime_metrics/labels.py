"""Values of labels: each from a closed set, whatever clients and workers send."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus

from router_core.errors import HTTPError

__all__ = ["ENDPOINTS", "OTHER", "Labels", "error_codes"]

OTHER = "other"
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
_STATUSES = frozenset(HTTPStatus)
#: nginx's number for a client that hung up before its answer. A worker may send it, too.
_CLIENT_GONE = 499

#: Paths at which engines generate, and the names that the SGLang gateway has for them.
ENDPOINTS = {
    "/generate": "generate",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
#: Other paths that a worker or a plugin answers and that no route names.
_PATHS = frozenset(
    (
        "/abort_request", "/api/chat", "/api/generate", "/begin_weight_update", "/classify", "/continue_generation",
        "/destroy_weights_update_group", "/detokenize", "/encode", "/end_weight_update", "/engine_metrics",
        "/flush_cache", "/get_loads", "/get_model_info", "/get_server_info", "/get_weight_version",
        "/health_generate", "/init_weights_update_group", "/invocations", "/load_lora_adapter",
        "/load_lora_adapter_from_distributed", "/load_lora_adapter_from_tensors", "/model_info",
        "/pause_generation", "/post_process_weights", "/pull_weights", "/release_memory_occupation", "/rerank",
        "/resume_memory_occupation", "/score", "/server_info", "/start_profile", "/stop_profile", "/tokenize",
        "/unload_lora_adapter", "/update_weight_version", "/update_weights_from_disk",
        "/update_weights_from_distributed", "/update_weights_from_ipc", "/update_weights_from_tensor",
        "/v1/classify", "/v1/detokenize", "/v1/embeddings", "/v1/loads", "/v1/models", "/v1/rerank", "/v1/score",
        "/v1/tokenize", "/vertex_generate",
    )
)  # fmt: skip
_GROUP = re.compile(r"\(\?P<(\w+)>[^)]*\)")


class Labels:
    """The closed sets of a router. A value that is a label already stays as it is.

    ``own_paths``: the patterns of the router's own routes.
    """

    def __init__(self, own_paths: Iterable[re.Pattern[str]]) -> None:
        written = [(pattern, _written(pattern)) for pattern in own_paths]
        self._exact = frozenset((*ENDPOINTS, *_PATHS, *(path for _, path in written)))
        self._patterns = [(pattern, path) for pattern, path in written if "{" in path]

    def path(self, path: str) -> str:
        """Return ``path``, or the pattern of its route with ``{parameters}``; ``"other"`` for an unknown path."""
        if path in self._exact:
            return path
        found = (written for pattern, written in self._patterns if pattern.fullmatch(path))
        return next(found, OTHER)

    @staticmethod
    def method(method: str) -> str:
        """Return ``method`` if it is one of HTTP's usual methods, else ``"OTHER"``."""
        return method if method in _METHODS else "OTHER"

    @staticmethod
    def status(status: int) -> int:
        """Return ``status`` if HTTP knows it, else the first status of its class.

        499 stays, and 0, which means that there was no answer, becomes 499. Other numbers become 500.
        """
        if status in _STATUSES or status == _CLIENT_GONE:
            return status
        return status // 100 * 100 if 100 <= status < 600 else _CLIENT_GONE if status == 0 else 500


def _written(pattern: re.Pattern[str]) -> str:
    """Return the path of a Starlette route, from its pattern."""
    path = pattern.pattern.removeprefix("^").removesuffix("$")
    return re.sub(r"\\(.)", r"\1", _GROUP.sub(r"{\1}", path))


def error_codes() -> frozenset[str]:
    """Return the codes of all errors that the core and the loaded plugins have."""
    kinds: list[type[HTTPError]] = [HTTPError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return frozenset((*(kind.code for kind in kinds), "HTTP_404", "HTTP_405"))  # two of Starlette's
