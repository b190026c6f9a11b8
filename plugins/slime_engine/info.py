"""Routes that describe the engine: health, model, load, tokenizer, metrics, and the journal."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import anyio
import orjson
from anyio.lowlevel import checkpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from slime_engine.engine import EngineHost
from slime_engine.errors import BadRequest, Unavailable
from slime_engine.fields import boolean, is_int
from slime_engine.http import JSONBytes, json_body
from slime_engine.journal import JournalEntry
from slime_engine.requests import GenerateBody, GenerateRequest, new_rid
from slime_engine.sampling import SamplingParams
from slime_engine.scheduler import Scheduler

__all__ = ["info_routes"]

_HEALTH_DEADLINE_S = 20.0
#: Journal entries that are written as JSON before the event loop gets a turn.
_JOURNAL_CHUNK = 64


def info_routes(host: EngineHost) -> list[Route]:
    """Return the routes for probes and inspection.

    An SGLang server does not listen before its model is loaded. This engine may listen earlier. Then requests for model
    and server info wait until the model is loaded. All other requests are refused until then.
    """

    async def health(request: Request) -> Response:
        host.engine  # noqa: B018  # raises unless the engine is up
        return Response()

    async def health_generate(request: Request) -> Response:
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        probe = GenerateRequest(f"HEALTH_CHECK_{new_rid()}", None, [0], params)
        with anyio.move_on_after(_HEALTH_DEADLINE_S):
            await host.engine.manager.collect(GenerateBody([probe], is_list=False))
            return Response()
        raise Unavailable(f"No token within {_HEALTH_DEADLINE_S:.0f} s.")

    async def model_info(request: Request) -> Response:
        engine = await host.loaded()
        path = str(engine.tokenizer_dir)
        return JSONBytes(
            {
                **engine.backend.info,
                "tokenizer_path": path,
                "is_generation": True,
                "weight_version": engine.scheduler.version,
                "disaggregation_mode": host.settings.disaggregation_mode,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(request: Request) -> Response:
        engine = await host.loaded()
        settings, events = host.settings, host.settings.kv_events
        arguments = asdict(settings) | {
            "model_path": engine.backend.info["model_path"],
            "served_model_name": settings.model_name,
            "tokenizer_path": str(engine.tokenizer_dir),
            "script": None if settings.script is None else settings.script.path,
            "weight_version": engine.scheduler.version,
            "enable_return_routed_experts": engine.backend.has_routed_experts,
            "tp_size": 1,
            "kv_events": None if events is None else events.described(settings.page_size, settings.dp_size),
        }
        return JSONBytes(arguments | {"status": "ready", "internal_states": rank_loads(engine.scheduler)})

    async def loads(request: Request) -> Response:
        each = rank_loads(host.engine.scheduler)
        return JSONBytes({"timestamp": time.time(), "dp_rank_count": len(each), "loads": each})

    async def old_load(request: Request) -> Response:
        return JSONBytes(
            [
                {
                    "dp_rank": load["dp_rank"],
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
                for load in rank_loads(host.engine.scheduler)
            ]
        )

    def rank_loads(scheduler: Scheduler) -> list[dict[str, Any]]:
        return [_load(scheduler, rank) for rank in range(host.settings.dp_size)]

    async def tokenize(request: Request) -> Response:
        body = await json_body(request)
        prompt = body.get("prompt")
        texts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("prompt must be a string or a list of strings.")
        tokens = await host.engine.manager.encode(texts)
        counts = [len(ids) for ids in tokens]
        single = not isinstance(prompt, list)
        return JSONBytes(
            {
                "tokens": tokens[0] if single else tokens,
                "count": counts[0] if single else counts,
                "max_model_len": host.settings.context_length,
            }
        )

    async def detokenize(request: Request) -> Response:
        body = await json_body(request)
        tokens, size = body.get("tokens"), host.engine.backend.vocab_size
        if not isinstance(tokens, list):
            raise BadRequest("tokens must be a list of token ids, or a list of such lists.")
        batch = tokens if tokens and isinstance(tokens[0], list) else [tokens]
        if not all(isinstance(ids, list) and all(is_int(i) and 0 <= i < size for i in ids) for ids in batch):
            raise BadRequest(f"tokens must be token ids in [0, {size - 1}].")
        skip = boolean(body, "skip_special_tokens", True)
        texts = [host.engine.backend.tokenizer.decode(ids, skip_special_tokens=skip) for ids in batch]
        return JSONBytes({"text": texts if batch is tokens else texts[0]})

    async def metrics(request: Request) -> Response:
        scheduler = host.engine.scheduler
        values = {
            "num_running_reqs gauge": len(scheduler.running),
            "num_queue_reqs gauge": len(scheduler.waiting),
            "prompt_tokens_total counter": scheduler.tokens["prompt"],
            "generation_tokens_total counter": scheduler.tokens["generation"],
        }
        lines = []
        for name_kind, value in values.items():
            name, _, kind = name_kind.partition(" ")
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines.append(f'sglang:{name}{{model_name="{host.settings.model_name}"}} {value}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def journal(request: Request) -> Response:
        entries = list(host.engine.journal.entries(request.query_params.get("rid")))
        return StreamingResponse(
            _journal_json(entries, host.engine.journal.dropped), media_type="application/json"
        )

    handlers: dict[str, Any] = {
        "/health": health,
        "/health_generate": health_generate,
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/v1/loads": loads,
        "/get_load": old_load,
        "/metrics": metrics,
        "/journal": journal,
    }
    return [
        *(Route(path, handler, methods=["GET"]) for path, handler in handlers.items()),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _load(scheduler: Scheduler, rank: int) -> dict[str, Any]:
    running, waiting = (
        [sequence for sequence in sequences.values() if sequence.entry.dp_rank == rank]
        for sequences in (scheduler.running, scheduler.waiting)
    )
    return {
        "dp_rank": rank,
        "num_running_reqs": len(running),
        "num_waiting_reqs": len(waiting),
        "num_total_reqs": len(running) + len(waiting),
        "num_used_tokens": sum(len(sequence.context) for sequence in (*running, *waiting)),
        "max_total_num_tokens": 1 << 30,
        "max_running_requests": scheduler.max_running,
    }


async def _journal_json(entries: list[JournalEntry], dropped: int) -> AsyncIterator[bytes]:
    """Yield ``{"dropped": n, "entries": [...]}``, in pieces: a long journal must not delay sampling."""
    yield b'{"dropped":%d,"entries":[' % dropped
    for start in range(0, len(entries), _JOURNAL_CHUNK):
        chunk = [orjson.dumps(entry.as_json()) for entry in entries[start : start + _JOURNAL_CHUNK]]
        yield (b"," if start else b"") + b",".join(chunk)
        await checkpoint()
    yield b"]}"
