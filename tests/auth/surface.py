"""Requests of each kind that the router answers, by the key that they need."""

from __future__ import annotations

import anyio

from core.servers import talk
from slime_testing import Running

TRAFFIC, ADMIN = "traffic-key-0123456789", "admin-key-0123456789"


async def status(running: Running, line: str, key: str | None = None) -> int:
    """The status of the request with this line (method and target), sent byte for byte."""
    shown = f"Authorization: Bearer {key}\r\n" if key is not None else ""
    request = f"{line} HTTP/1.1\r\nHost: localhost\r\n{shown}Content-Length: 0\r\nConnection: close\r\n\r\n"
    with anyio.fail_after(5):
        reply = await talk(running.url, request.encode("latin-1"))
    return int(reply[9:12])


OPEN = ["GET /health", "HEAD /health", "GET /liveness", "GET /readiness", "GET /health?a=b", "GET /%68ealth"]
#: The worker's answer to a generation.
DATA = [
    *("POST /generate", "POST /generate?a=/update_weights_from_disk", "POST /v1/chat/completions"),
    *("POST /v1/completions", "POST /v1/embeddings", "GET /v1/models", "GET /v1/models/Qwen/Qwen3-0.6B"),
    *("POST /v1/responses", "POST /v1/responses/resp_1/cancel", "POST /v1/messages", "POST /v1/rerank"),
    *("POST /tokenize", "POST /detokenize", "POST /encode", "POST /classify", "POST /rerank", "POST /score"),
    *("GET /get_model_info", "POST http://elsewhere/generate", "POST /generate#/../flush_cache"),
]
#: Paths that a worker may take for control, whatever it makes of the spelling.
CONTROL = [
    *("POST /update_weights_from_disk", "POST /load_lora_adapter", "POST /v1/load_lora_adapter"),
    *("POST /configure_logging", "POST /abort_request", "GET /flush_cache", "POST /flush_cache"),
    *("GET /server_info", "GET /get_server_info", "GET /metrics", "GET /", "GET /v1", "POST /v1/"),
    *("POST /unheard_of", "POST /set_internal_state", "POST /open_session", "POST /start_profile"),
    *("POST /%75pdate_weights_from_disk", "POST /%67enerate", "POST /generate/", "POST //generate"),
    *("POST /Generate", "POST /GENERATE", "POST /./generate", "POST /x/../generate", "POST /generate%20"),
    *("POST /generate/../update_weights_from_disk", "POST /generate/%2e%2e/update_weights_from_disk"),
    *("POST /v1/../update_weights_from_disk", "POST /v1/models/../../flush_cache", "POST /v1//models"),
    *("POST /v1/models/%2e%2e/%2e%2e/flush_cache", "POST /v1/models/..%2f..%2fflush_cache"),
    *("POST /v1/models/..;/flush_cache", "POST /v1/models/..", "POST /v1/models/.", "POST /v1/models/"),
    *("POST /v1/models/%0a", "POST /v1/models%2fx", "POST /generate;x", "POST /generate%00"),
    *("POST http://elsewhere/flush_cache", "POST /flush_cache?/generate", "POST /flush_cache#/generate"),
    *("POST /health", "POST /health/", "GET /health/", "GET /health/../flush_cache", "GET /HEALTH"),
]
#: The core's own.
OWN = [
    *("GET /workers", "POST /workers", "GET /workers/", "GET /workers/x", "DELETE /workers/x"),
    *("GET /workers/..", "GET /workers/%2e%2e/health", "GET /workers/../health", "GET /%77orkers"),
    *("GET /list_workers", "POST /add_worker?url=http://10.0.0.1", "POST /remove_worker?url=http://10.0.0.1"),
    *("POST /weight_version", "PUT /workers", "OPTIONS /workers", "GET /%6cist_workers"),
]
